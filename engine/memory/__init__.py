"""The memory of one device, counted in chunks: the arena that holds KV, the ranges that hold weights, and copies to and from the
host (docs/design/memory.md)."""
