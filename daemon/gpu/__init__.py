"""The node's GPUs, as the driver reports them."""
