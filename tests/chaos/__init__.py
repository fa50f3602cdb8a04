"""A node under load while everything around it goes wrong, in an order that a seed repeats: python -m tests.chaos --seconds 600."""
