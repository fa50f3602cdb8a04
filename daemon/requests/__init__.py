"""Keeps the open requests, and connects the API with the node scheduler and the engines."""
