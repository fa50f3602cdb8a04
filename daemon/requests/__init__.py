"""The open requests: links the API with the node scheduler and the engines."""
