"""Facilities of the daemon's process that do not depend on what it serves: logs, supervised tasks, systemd, watches of files."""
