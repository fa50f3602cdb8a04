"""The requests that are open, between the API, the node scheduler and the engines."""
