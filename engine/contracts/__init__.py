"""The interfaces between the parts of an engine: devices, loads, steps of models, LoRA adapters, and groups of devices."""
