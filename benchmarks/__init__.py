"""Measures the README's figures: each script prints one JSON line a run; `run` writes the tables of docs/performance.md."""
