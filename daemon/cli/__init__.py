"""`hearth`: the operator's command line, with one file per group of commands. To start fast, it imports http.client for the control
socket instead of a larger HTTP library; commands import what they need when they run.
"""
