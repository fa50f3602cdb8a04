"""The node's counters, and the page /metrics."""
