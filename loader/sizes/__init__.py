"""Computes how many bytes a model takes on a device, and where each tensor lies, for a whole model or a device's share of a split
one.
"""
