"""Manages the lives of the models on one device: loads, first steps, saved KV, evictions."""
