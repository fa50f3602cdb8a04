"""Steps whose kernel calls are recorded when they first run, and repeated without Python from then on: what CUDA graphs are on a
GPU."""
