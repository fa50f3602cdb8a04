"""`hearth doctor`: what of this machine stands in the way, and what to change."""
