"""Steps that are recorded when they first run, and repeated without Python: what CUDA graphs are on a GPU."""
