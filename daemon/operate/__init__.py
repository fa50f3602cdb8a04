"""The operators' side of the node: the control API and its views."""
