"""Manages the models on one device from load to eviction: loads, first steps (which run while weights arrive), saved KV,
evictions."""
