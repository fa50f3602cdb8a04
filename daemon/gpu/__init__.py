"""The node's GPUs, as the driver tells of them."""
