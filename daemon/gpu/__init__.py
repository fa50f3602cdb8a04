"""Finds the node's GPUs, as the driver reports them, and watches them for faults."""
