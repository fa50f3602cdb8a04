"""Simulates a node faster than real time, to try its scheduler: engines and disks are a cost model. Read `simulation` first."""
