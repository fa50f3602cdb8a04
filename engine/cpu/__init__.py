"""The `cpu` device: its memory, its operations, and how models run on it, also by recorded steps."""
