"""Programs: recorded kernel calls with their arguments, which are repeated without Python. Operations know only these, and
engine/cpu/recording decides which steps of a model become programs."""
