"""Contains the Numba kernels of the `cpu` device."""
