"""Layers that several families of models share: plain functions and small modules over the operations of `engine.ops`."""
