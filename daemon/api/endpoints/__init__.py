"""Implements the endpoints of the HTTP API, one file each."""
