"""Brings weights into a device's memory, and keeps copies of them in the host tier."""
