"""Traces requests and loads (OpenTelemetry): makes the spans of which a trace consists, and sends them to a collector."""
