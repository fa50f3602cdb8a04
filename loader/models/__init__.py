"""Finds and checks the models, draft heads and LoRA adapters in the models folder."""
