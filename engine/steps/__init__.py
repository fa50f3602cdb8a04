"""The forward pass of a step: its inputs, and the ways it is run (directly, as a recorded program, as a CUDA graph, in slices)."""
