"""The `cpu` device: its memory, its operations, and how models run on it, with recorded steps (kernel calls that are kept and made
again) where possible."""
