"""Defines the options of `hearth simulate` and `hearth trace`, and prints their results."""
