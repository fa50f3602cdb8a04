"""Manages a model's life on one device: loads, first steps, saved KV, evictions."""
