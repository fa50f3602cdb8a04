"""Implements `hearth`, the operator's command line, with one file for each few related commands. To start fast, it imports
http.client for the control socket instead of a larger HTTP library; commands import what they need when they run.
"""
