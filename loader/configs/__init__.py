"""Reads what a model's config.json says: its shape, its kernels, its pooling, and the matrix multiplications that adapters may
change."""
