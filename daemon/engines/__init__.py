"""Starts, watches and restarts the engine processes, and receives their reports."""
