"""What the daemon's process needs whatever it serves: logs, tasks that are watched, systemd, files that are watched."""
