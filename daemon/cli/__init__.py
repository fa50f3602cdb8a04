"""`hearth`: the operator's command line, one file per group of commands. It starts fast: it imports http.client for the control
socket, and nothing heavier.
"""
