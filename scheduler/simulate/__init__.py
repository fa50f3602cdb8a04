"""Simulates a node faster than real time, to try the node scheduler: engines and disks are a cost model. Read `simulation` first.
"""
