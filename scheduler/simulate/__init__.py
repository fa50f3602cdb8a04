"""Simulates a node faster than real time, to try its scheduler. Engines and disks are replaced by a model of their costs. Read
`simulation` first."""
