"""Records of the node: the state on disk, the latest events, the audit log."""
