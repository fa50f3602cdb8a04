"""The node: its parts put together, its settings as they are now, and their reloads."""
