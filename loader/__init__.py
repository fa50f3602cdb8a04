"""From checkpoint folders to bytes in device memory. What the daemon takes of it needs no torch.

Part of hearthd.
"""
