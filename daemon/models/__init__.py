"""The models of this node: their names, settings and files."""
