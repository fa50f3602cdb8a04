"""How many bytes a model takes on a device, and where each tensor lies, whole or as a share of a split model."""
