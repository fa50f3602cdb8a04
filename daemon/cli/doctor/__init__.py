"""Implements `hearth doctor`, which checks this machine for problems that affect hearthd, and says what to change."""
