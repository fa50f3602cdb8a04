"""Writes and verifies packed weight files."""
