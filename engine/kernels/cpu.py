"""The CPU kernels as ops.py calls them, compiled for one element type at a time and kept in Numba's cache folder.

Set the cache folder and the threading layer before this is imported. After `prepare` nothing compiles for that element type.
"""

from __future__ import annotations

import threading
from typing import Any

import numba

from engine.kernels import cpu_attention, cpu_linear, cpu_logprobs, cpu_rows, cpu_sampling
from engine.kernels.cpu_attention import paged_attention_parallel, paged_attention_serial
from engine.kernels.cpu_linear import few_rows_linear_parallel, few_rows_linear_serial
from engine.kernels.cpu_logprobs import penalise, top_logprobs
from engine.kernels.cpu_rows import add_rms_norm, gelu_and_mul, rms_norm, rope_and_store, silu_and_mul
from engine.kernels.cpu_sampling import greedy_bfloat16, greedy_float32, sample

__all__ = [
    "add_rms_norm",
    "few_rows_linear",
    "gelu_and_mul",
    "greedy_bfloat16",
    "greedy_float32",
    "paged_attention",
    "penalise",
    "prepare",
    "rms_norm",
    "rope_and_store",
    "sample",
    "set_num_threads",
    "silu_and_mul",
    "top_logprobs",
]

# Below these, waking the other threads (30 to 40 us) costs more than they save. Elements of keys that are read; of weights.
_SHARED_ATTENTION = 1 << 20
_SHARED_WEIGHTS = 4 << 20
_parallel = False
_preparing = threading.Lock()  # loads of two models may ask at the same time


def prepare(dtype: str, parallel: bool) -> None:
    """Compiles all kernels for float32 or bfloat16 (about 6 s, 10 s with the parallel ones), or loads them from the cache."""
    element = numba.float32 if dtype == "float32" else numba.uint16
    wanted = [
        (paged_attention_serial, cpu_attention.paged_attention_signature(element)),
        (rms_norm, cpu_rows.rms_norm_signature(element)),
        (add_rms_norm, cpu_rows.add_rms_norm_signature(element)),
        (rope_and_store, cpu_rows.rope_and_store_signature(element)),
        (silu_and_mul, cpu_rows.gate_signature(element)),
        (gelu_and_mul, cpu_rows.gate_signature(element)),
        (sample, cpu_sampling.sample_signature(element)),
        (top_logprobs, cpu_logprobs.top_logprobs_signature(element)),
        (greedy_float32, cpu_sampling.GREEDY_FLOAT32),
        (penalise, cpu_logprobs.PENALISE),
    ]
    if dtype == "bfloat16":  # rows whose logits are edited are sampled in float32
        wanted.append((few_rows_linear_serial, cpu_linear.SIGNATURE))
        wanted.append((greedy_bfloat16, cpu_sampling.GREEDY_BFLOAT16))
        wanted.append((sample, cpu_sampling.sample_signature(numba.float32)))
    if parallel:
        wanted.append((paged_attention_parallel, cpu_attention.paged_attention_signature(element)))
        if dtype == "bfloat16":
            wanted.append((few_rows_linear_parallel, cpu_linear.SIGNATURE))
    with _preparing:
        for kernel, signature in wanted:
            kernel.disable_compile(False)
            kernel.compile(signature)
            kernel.disable_compile()  # arguments of other types are an error, not seconds of compiling inside a step


def set_num_threads(num_threads: int) -> None:
    """Of the calling thread's kernels. Above the number of cores Numba started with, that number is used."""
    global _parallel
    _parallel = num_threads > 1
    if _parallel:
        numba.set_num_threads(min(num_threads, numba.config.NUMBA_NUM_THREADS))


def paged_attention(*args: Any) -> None:
    *_, contexts, _window, _scale, _softcap, out = args
    shared = _parallel and int(contexts.sum()) * out.shape[1] >= _SHARED_ATTENTION
    (paged_attention_parallel if shared else paged_attention_serial)(*args)


def few_rows_linear(x: Any, weight: Any, bias: Any, out: Any) -> None:
    shared = _parallel and weight.size >= _SHARED_WEIGHTS
    (few_rows_linear_parallel if shared else few_rows_linear_serial)(x, weight, bias, out)
