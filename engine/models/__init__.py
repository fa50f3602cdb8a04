"""The models: one file for each kind of model that computes differently; `registry` maps a family's description to the class that
runs it."""
