"""Defines the node's settings: their schema, the TOML file and the flags that set them, and their reload. It imports none of the
other packages.

Part of hearthd.
"""
