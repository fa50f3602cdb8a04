"""The models in service on one device: the memory each owns, their requests, and the channel to the daemon."""
