"""Brings checkpoints from their folders into device memory. The modules that the daemon imports need no torch.

Part of hearthd.
"""
