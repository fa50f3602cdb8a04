"""The node: the object that makes and connects its parts, the settings in use, and their reloads."""
