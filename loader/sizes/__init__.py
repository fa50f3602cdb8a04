"""Computes how many bytes a model, or a device's share of a split model, takes on a device, and where each of its tensors lies."""
