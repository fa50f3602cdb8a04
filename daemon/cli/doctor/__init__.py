"""`hearth doctor`: checks what on this machine stands in hearthd's way, and what to change."""
