"""Implements `hearth pull`, which downloads a checkpoint from the Hugging Face hub into the models folder."""
