"""The console scripts, and whether the packages that Python finds are hearthd's own. Part of hearthd."""
