"""Implements the `cpu` device: its memory, its operations, and the steps of models on it. Where possible, the kernel calls of a
step are recorded and made again."""
