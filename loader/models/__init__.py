"""Finds and checks the models in the models folder, their draft models and their adapters."""
