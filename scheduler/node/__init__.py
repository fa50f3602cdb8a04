"""Decides which model is on which device and which request goes there. Runs in the daemon process. Read `node_scheduler` first."""
