"""Scans the models folder in a separate process, which may hang or run out of memory without harm to the daemon."""
