"""The operations that models are made of: their interface (ops.py), and the reference implementation in torch and numpy."""
