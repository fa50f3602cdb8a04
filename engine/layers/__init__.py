"""Layers shared by the families: plain functions and small modules over `engine.ops`."""
