"""Reads weights from drives or from other memory into the memory of a device."""
