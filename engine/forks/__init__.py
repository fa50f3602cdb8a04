"""Implements the fork server, the process that forks engines, and its messages to and from the daemon."""
