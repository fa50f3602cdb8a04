"""`hearth doctor`: checks this machine for problems that affect hearthd, and says what to change."""
