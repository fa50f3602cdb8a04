"""Provides what the daemon's process needs whatever it serves: logs, supervised tasks, the connection to systemd, watches of
files."""
