"""Serves the models loaded on one device: manages the memory that each owns, their requests, and the channel to the daemon."""
