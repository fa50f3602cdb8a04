"""Programs: recorded kernel calls with their arguments, which are made again without Python between them. The operations
(engine/cpu/ops.py) import this package, but not engine/cpu/recording, which decides which steps of a model become programs."""
