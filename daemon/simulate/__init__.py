"""Implements `hearth simulate` and `hearth trace`: reads files and prints tables. The simulation itself is in
scheduler/simulate."""
