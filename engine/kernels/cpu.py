"""The CPU kernels as ops.py calls them. Importing this compiles or loads them all, so set Numba's cache folder and threading layer
first; nothing compiles later."""

from __future__ import annotations

from typing import Any

import numba

from engine.kernels.cpu_attention import paged_attention_parallel, paged_attention_serial
from engine.kernels.cpu_rows import add_rms_norm, rms_norm, rope_and_store, silu_and_mul
from engine.kernels.cpu_sampling import greedy_bfloat16, greedy_float32, sample

__all__ = [
    "add_rms_norm",
    "greedy_bfloat16",
    "greedy_float32",
    "paged_attention",
    "rms_norm",
    "rope_and_store",
    "sample",
    "set_num_threads",
    "silu_and_mul",
]

_parallel = False


def set_num_threads(num_threads: int) -> None:
    """Of the calling thread's kernels. Above the number of cores Numba started with, that number is used."""
    global _parallel
    _parallel = num_threads > 1
    if _parallel:
        numba.set_num_threads(min(num_threads, numba.config.NUMBA_NUM_THREADS))


def paged_attention(*args: Any) -> None:
    (paged_attention_parallel if _parallel else paged_attention_serial)(*args)
