"""Defines the operations of which models are made: their interface (ops.py), and the reference implementation in torch and numpy
(reference.py, reference_inputs.py)."""
