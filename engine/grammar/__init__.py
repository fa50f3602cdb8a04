"""Constrained sampling: a separate process for each model computes which tokens a grammar allows next; limits by token id are
applied in the engine."""
