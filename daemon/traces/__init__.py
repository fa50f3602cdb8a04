"""Traces of requests and loads (OpenTelemetry): the spans that they consist of, and how these get to a collector."""
