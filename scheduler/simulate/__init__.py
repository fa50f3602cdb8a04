"""A node played for the node scheduler, faster than real time: engines and disks as a cost model. Read `simulation` first."""
