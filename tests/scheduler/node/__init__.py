"""The node scheduler against engines that are played: no process, no clock."""
