"""Calls of tools in a model's text: one file a dialect, read as the text comes, each character once."""
