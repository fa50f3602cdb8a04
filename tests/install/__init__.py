"""hearthd as pip installs it, away from its clone."""
