"""Implements the devices of kind `cuda`, NVIDIA GPUs: memory, operations, models and CUDA graphs."""
