"""The device an engine process owns. Import-light: `prepare_process` must run before torch or numba are imported."""

from __future__ import annotations

import os

# Below this a model's matrix products end sooner than a second thread wakes up.
SINGLE_THREAD_WEIGHTS_BYTES = 32 << 20


def prepare_process() -> None:
    """Settings the OpenMP runtimes (torch's and Numba's) read once, when they are loaded: waiting threads sleep, not spin.

    On a shared machine that is the difference between a step and a stall (measured: small matrix products 5 to 20 times slower)."""
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    os.environ["GOMP_SPINCOUNT"] = "0"
    os.environ["KMP_BLOCKTIME"] = "0"


def num_cores() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0))


def threads_for(weights_bytes: int, configured: int) -> int:
    """Compute threads for one model. configured: Configure.threads, 0 for the cores."""
    if weights_bytes < SINGLE_THREAD_WEIGHTS_BYTES:
        return 1
    return configured or num_cores()
