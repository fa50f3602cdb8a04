"""NVIDIA GPUs: memory, operations, models and CUDA graphs."""
