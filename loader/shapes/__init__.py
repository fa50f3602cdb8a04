"""Facts of a model as numbers and types: its sizes, positions, KV, and the checked fields of its configuration."""
