"""Models: one plain file for each kind that computes differently; `registry` maps a family's description to its file."""
