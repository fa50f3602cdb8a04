"""Describes the model families, one in each file: what a family reads from config.json, its tensors, and its layers with sliding
windows. `registry` lists them.
"""
