"""What the README's figures come from: each script prints one JSON line a run; `run` writes the tables of docs/performance.md."""
