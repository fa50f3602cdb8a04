"""Keeps the node's counters, and renders them as the page /metrics for Prometheus."""
