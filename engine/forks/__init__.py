"""The process that forks engines, and its messages."""
