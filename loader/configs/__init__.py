"""Reads the configuration of a model: its shape, the sets of kernels that it needs, its pooling, and the matrix multiplications
that adapters may change.
"""
