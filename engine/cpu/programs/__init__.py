"""Records programs, the kernel calls of a step with their arguments, and makes the calls again without Python between them. The
operations (engine/cpu/ops.py) use this package. It does not import engine/cpu/recording, which decides which steps of a model
become programs."""
