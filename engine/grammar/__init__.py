"""Constrained sampling: computes which tokens a grammar allows next, in a separate process for each model, and applies token
limits.
"""
