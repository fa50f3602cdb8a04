"""What outlives a moment: the state on disk, the latest events."""
