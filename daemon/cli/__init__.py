"""`hearth`: the operator's command line, one file per noun. Starts fast: http.client over the control socket, nothing heavier."""
