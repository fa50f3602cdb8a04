"""The models in service on one device: who owns which memory, their requests, and the channel to the daemon."""
