"""The engine's loop, and what it does between steps."""
