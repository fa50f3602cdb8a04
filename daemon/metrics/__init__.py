"""The node's counters, and their rendering as the page /metrics for Prometheus."""
