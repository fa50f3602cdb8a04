"""From checkpoint folders to bytes in device memory. `catalog`, `safetensors`, `hf_config` and `sizing` need no torch.

Part of hearthd.
"""
