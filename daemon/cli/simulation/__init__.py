"""`hearth simulate` and `hearth trace`: their options and what they print."""
