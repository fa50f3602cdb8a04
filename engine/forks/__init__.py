"""The process that forks engines, and the messages it exchanges with the daemon."""
