"""Memory of one device: the KV arena and the weight ranges, counted in chunks (docs/design/memory.md)."""
