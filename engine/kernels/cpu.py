"""The CPU kernels as ops.py calls them, compiled for one element type at a time and kept in Numba's cache folder.

Set the cache folder and the threading layer before this is imported. After `prepare` nothing compiles for that element type.
"""

from __future__ import annotations

from typing import Any

import numba

from engine.kernels import cpu_attention, cpu_rows, cpu_sampling
from engine.kernels.cpu_attention import paged_attention_parallel, paged_attention_serial
from engine.kernels.cpu_rows import add_rms_norm, rms_norm, rope_and_store, silu_and_mul
from engine.kernels.cpu_sampling import greedy_bfloat16, greedy_float32, sample

__all__ = [
    "add_rms_norm",
    "greedy_bfloat16",
    "greedy_float32",
    "paged_attention",
    "prepare",
    "rms_norm",
    "rope_and_store",
    "sample",
    "set_num_threads",
    "silu_and_mul",
]

_parallel = False


def prepare(dtype: str, parallel: bool) -> None:
    """Compiles all kernels for float32 or bfloat16 (about 2 s, 5 s with the parallel ones), or loads them from the cache."""
    element = numba.float32 if dtype == "float32" else numba.uint16
    paged_attention_serial.compile(cpu_attention.paged_attention_signature(element))
    if parallel:
        paged_attention_parallel.compile(cpu_attention.paged_attention_signature(element))
    rms_norm.compile(cpu_rows.rms_norm_signature(element))
    add_rms_norm.compile(cpu_rows.add_rms_norm_signature(element))
    rope_and_store.compile(cpu_rows.rope_and_store_signature(element))
    silu_and_mul.compile(cpu_rows.silu_and_mul_signature(element))
    sample.compile(cpu_sampling.sample_signature(element))
    if dtype == "float32":
        greedy_float32.compile(cpu_sampling.GREEDY_FLOAT32)
    else:
        greedy_bfloat16.compile(cpu_sampling.GREEDY_BFLOAT16)


def set_num_threads(num_threads: int) -> None:
    """Of the calling thread's kernels. Above the number of cores Numba started with, that number is used."""
    global _parallel
    _parallel = num_threads > 1
    if _parallel:
        numba.set_num_threads(min(num_threads, numba.config.NUMBA_NUM_THREADS))


def paged_attention(*args: Any) -> None:
    (paged_attention_parallel if _parallel else paged_attention_serial)(*args)
