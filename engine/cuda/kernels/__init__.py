"""Triton kernels, which also run interpreted on the CPU."""
