"""Traces of requests and loads: what they are made of, and how they get to a collector (OpenTelemetry)."""
