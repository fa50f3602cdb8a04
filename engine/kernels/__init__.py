"""Kernels, each with a torch twin in `reference`; only `engine.ops` picks between them."""
