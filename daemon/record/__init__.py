"""Keeps the node's records: the state on disk, the latest events, the audit log."""
