"""Records a model's steps as programs (engine/cpu/programs) when they first run, one for each kind and size, and replays them: what
CUDA graphs are on a GPU."""
