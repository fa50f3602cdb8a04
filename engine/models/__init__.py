"""One plain file for each kind of model that computes differently; `registry` maps a family's description to its file."""
