"""Manages the memory of one device, which is counted in chunks: the arena that holds KV, the address ranges that hold weights, and
copies to and from the host (docs/design/memory.md).
"""
