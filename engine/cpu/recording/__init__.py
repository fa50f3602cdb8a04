"""Records a model's steps as programs (engine/cpu/programs): each kind and size of step when it first runs. From then on the
recorded calls are made again. This is on the CPU what CUDA graphs are on a GPU."""
