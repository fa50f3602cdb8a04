"""`hearth simulate` and `hearth trace`: files in and tables out; what is simulated stands in scheduler/simulate."""
