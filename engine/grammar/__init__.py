"""Sequences whose text must follow a grammar: which tokens may come next, worked out in a process of its own per model."""
