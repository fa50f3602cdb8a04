"""Runs the engine's loop, and the work that it does between steps."""
