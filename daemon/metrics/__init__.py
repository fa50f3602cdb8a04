"""What the node counts, and /metrics."""
