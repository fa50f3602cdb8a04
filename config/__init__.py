"""The node's settings: their schema, the TOML file and the flags they come from, and reloading them. Imports none of the other
packages.

Part of hearthd.
"""
