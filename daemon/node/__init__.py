"""The node: makes and connects the daemon's parts, and holds the settings in use and reloads them."""
