"""Packed weight files: writes and verifies them."""
