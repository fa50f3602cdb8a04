"""Defines the console scripts, and checks that the packages Python finds are hearthd's own. Part of hearthd."""
