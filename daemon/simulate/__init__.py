"""Implements `hearth simulate` and `hearth trace`, which read files and print tables. The simulation itself is in
scheduler/simulate."""
