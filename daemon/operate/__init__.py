"""Serves the node's operators: the control API, and the views that `hearth` and the status page show."""
