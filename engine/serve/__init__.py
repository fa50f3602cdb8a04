"""Code for the models loaded on one device: the memory that each owns, their requests, and the channel to the daemon."""
