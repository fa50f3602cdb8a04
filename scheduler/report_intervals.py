"""Defines the intervals at which engines and the daemon report to the node scheduler. Engines, daemon, scheduler and simulator use
the same values.
"""

from __future__ import annotations

STATS_EVERY_S = 0.25  # an engine reports the KV of its models and the requests that wait in it, while it has any
KERNEL_WAIT_EVERY_S = 1.0  # an engine reports a load that waits for kernels: first after this time, then at this interval
PREFILL_EVERY_S = 0.5  # of each model at most one measurement of a prompt's speed is reported in this time
MEASURED_PREFILL_TOKENS = 32  # shorter prompts are not measured, because most of their time is a step's overhead
