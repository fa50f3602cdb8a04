"""`hearth simulate` and `hearth trace`: their options and their output."""
