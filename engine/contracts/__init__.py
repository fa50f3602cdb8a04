"""Defines the interfaces between the parts of an engine: devices, loads of models, steps of models, LoRA adapters, and the devices
of a split model.
"""
