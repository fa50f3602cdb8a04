"""Keeps the models of this node: their names, settings and files."""
