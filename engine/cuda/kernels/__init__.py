"""Contains the Triton kernels of GPUs, which can also run interpreted on the CPU."""
