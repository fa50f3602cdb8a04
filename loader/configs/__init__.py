"""Reads what a model's config.json says: its shape, its kernels, its pooling, and the products that adapters may change."""
