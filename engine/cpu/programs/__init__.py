"""Programs: recorded kernel calls with their arguments, which can be made again without Python between them. The operations
(engine/cpu/ops.py) use this package. It does not import engine/cpu/recording, which decides which steps of a model become
programs."""
