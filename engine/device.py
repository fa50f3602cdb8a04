"""The device an engine process owns. Import-light: `prepare_process` must run before torch or numba are imported."""

from __future__ import annotations

import os

from config import processor
from engine.protocol import Configure

# Below this a model's matrix products end sooner than a second thread wakes up.
SINGLE_THREAD_WEIGHTS_BYTES = 32 << 20
# Looks a waiting thread takes before it sleeps: some 50 to 100 us.
SPIN_COUNT = "3000"


def prepare_process() -> None:
    """Settings of the libraries that compute: which of the processor's features they may use (config/processor.py), and those of
    the OpenMP runtime, whose threads torch's products and Numba's kernels share; they read them when they are loaded.

    A thread spins long enough to meet the next product of the same step, then sleeps. Measured with 2 threads on 2 cores: never
    spinning takes 15 % longer for steps of 8 to 32 rows, spinning ten times as long costs a third more CPU at 32 rows, and without
    a limit small products beside other processes take 5 to 20 times as long.

    While more threads have a team than there are cores libgomp lets them look less often, though most may be asleep, as those of a
    first step are that waits for weights: never by the passive policy, 1,000 times by the active one, which changes nothing else
    where a count is given. Measured beside a team that waits: steps of 8 rows of mid 17.6 ms passively, 9.1 actively, 8.6 with no
    other team; beside one that computes 18.4 and 21.4."""
    processor.limit_libraries()
    os.environ["OMP_WAIT_POLICY"] = "ACTIVE"
    os.environ["GOMP_SPINCOUNT"] = SPIN_COUNT
    os.environ["KMP_BLOCKTIME"] = "0"


def num_cores() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0))


def compute_threads(configure: Configure) -> int:
    """That the steps of a large model share; 1 where they are not the cpu's."""
    if configure.runner != "torch" or configure.device.startswith("cuda"):
        return 1
    return configure.threads or num_cores()


def threads_for(weights_bytes: int, configured: int) -> int:
    """Compute threads for one model. configured: Configure.threads, 0 for the cores."""
    if weights_bytes < SINGLE_THREAD_WEIGHTS_BYTES:
        return 1
    return configured or num_cores()
