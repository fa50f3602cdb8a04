"""Sets up an engine process for the libraries that compute in it. This module imports little, because `prepare_process` must run
before torch or numba is imported."""

from __future__ import annotations

import ctypes
import importlib
import os
import sys
from types import ModuleType

from engine.host import processor

# How often a waiting thread checks for work before it sleeps: some 50 to 100 us.
SPIN_COUNT = "3000"
_PR_SET_NAME = 15  # linux/prctl.h


def prepare_process() -> None:
    """Sets the environment variables of the libraries that compute: which processor features they may use
    (engine/host/processor.py), and how the OpenMP runtime behaves, whose threads torch's matrix multiplications and Numba's kernels
    share. Must be called before the libraries are loaded, because they read the variables then.

    A waiting thread spins (checks for work without sleeping) long enough for the next matrix multiplication of the same step to
    begin, then sleeps. Measured with 2 threads on 2 cores: without spinning, steps of 8 to 32 rows take 15 % longer; spinning ten
    times as long costs a third more CPU at 32 rows; without a limit, small matrix multiplications take 5 to 20 times as long while
    other processes run.

    The wait policy (OMP_WAIT_POLICY) is ACTIVE because of moments in which all of libgomp's teams together have more threads than
    there are cores, even if most of these threads sleep, like those of a first step that waits for weights. libgomp then lowers the
    spin count: to 0 under the policy PASSIVE, but only to 1,000 under ACTIVE. At other times the policy has no effect, because a
    spin count is given. Measured with steps of 8 rows of the model mid: 8.6 ms without another team; while another team waits, 17.6
    ms under PASSIVE and 9.1 ms under ACTIVE; while it computes, 18.4 ms and 21.4 ms."""
    processor.limit_libraries()
    os.environ["OMP_WAIT_POLICY"] = "ACTIVE"
    os.environ["GOMP_SPINCOUNT"] = SPIN_COUNT
    os.environ["KMP_BLOCKTIME"] = "0"


def import_torch_without_meta_kernels() -> None:
    """Imports torch, if it is not imported yet, without its kernels for the device "meta", which take a quarter of the import's
    time. They are needed only for tracing and compiling models, which this process cannot do afterwards."""
    if "torch" not in sys.modules:
        name = "torch._meta_registrations"
        sys.modules[name] = ModuleType(name, "Left out: see engine/host/process.py.")
        importlib.import_module("torch")


def name_process(name: str) -> None:
    """Sets the name of this process that `ps -o comm` and `top` show; the kernel keeps 15 characters."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode()[:15], 0, 0, 0)


def num_cores() -> int:
    """Returns the number of cores this process may run on."""
    return len(os.sched_getaffinity(0))
