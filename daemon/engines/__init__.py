"""The engine processes: their start, watch, restart, and what they report."""
