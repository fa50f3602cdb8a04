"""The `cpu` device: memory, operations, models and recorded steps."""
