"""The console scripts, and the check that the packages Python finds are hearthd's own. Part of hearthd."""
