"""Weights on their way into a device's memory, and copies of them in the host tier."""
