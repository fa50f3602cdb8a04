"""Models of the models folder: finds and checks them, their draft models and their adapters."""
