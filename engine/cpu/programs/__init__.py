"""Programs: recorded kernel calls with their arguments, which are repeated without Python. The operations (engine/cpu/ops.py) use
only this package to record their calls; engine/cpu/recording decides which steps of a model become programs."""
