"""The node's settings: schema, TOML file and flags, reload. A leaf: it imports nothing of the other packages.

Part of hearthd.
"""
