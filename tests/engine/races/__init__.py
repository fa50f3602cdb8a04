"""A happens-before checker of the CUDA path, without a GPU: engine/cuda runs in random schedules over a stand-in that gives every
stream, event, graph and thread a vector clock, and reports accesses to the same memory that nothing orders.
"""
