"""Numba kernels of the `cpu` device."""
