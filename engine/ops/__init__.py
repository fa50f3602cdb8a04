"""The operations that models are made of: their interface, and the reference implementation on torch."""
