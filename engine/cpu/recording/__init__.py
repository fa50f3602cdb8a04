"""Records a model's steps as programs (engine/cpu/programs) when they first run, one for each kind and size, and makes the recorded
calls again later. That is what CUDA graphs are on a GPU."""
