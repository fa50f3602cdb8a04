"""Copies memory and computes its checksum in one pass (Numba). The stores bypass the cache, so that the checksum costs nothing and
the copy is faster than memcpy's. Reference implementation: engine/host/checksum.py.

Shapes: N 8-byte words.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, int64, njit, types, uint64, void
from numba.extending import intrinsic


@intrinsic
def _store_past_cache(typing_context: Any, array: Any, index: Any, value: Any) -> Any:
    """Stores `value` to array[index], both uint64, without bringing the cache line into the caches (a non-temporal store)."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        store = builder.store(args[2], builder.gep(data, [args[1]]))
        store.align = 8
        store.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)]))
        return context.get_dummy_value()

    return types.void(array, types.uint64, types.uint64), generate


@njit(void(uint64[::1], uint64[::1], uint64[::1]), error_model="numpy", cache=True, nogil=True)
def copy_and_sum(target: Any, source: Any, sums: Any) -> None:
    """Copies the words of source to target, both [N] uint64. Adds the sum of the words to sums[0] and the sum of index * word to
    sums[1], modulo 2**64."""
    plain, weighted = np.uint64(0), np.uint64(0)
    for index in range(source.shape[0]):
        word = source[index]
        plain += word
        weighted += word * np.uint64(index)
        _store_past_cache(target, np.uint64(index), word)
    sums[0] += plain
    sums[1] += weighted


@intrinsic
def _words_at(typing_context: Any, address: Any) -> Any:
    """Returns a pointer to 8-byte words (uint64) at an address (int64)."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], ir.IntType(64).as_pointer())

    return types.CPointer(types.uint64)(types.int64), generate


@njit(void(int64[::1], int64[::1], int64[::1], uint64[:, ::1]), error_model="numpy", cache=True, nogil=True)
def copy_and_sum_each(targets: Any, sources: Any, num_words: Any, sums: Any) -> None:
    """Copies P pieces of memory, and adds the two sums of each piece's checksum to its row of sums [P, 2] uint64, as copy_and_sum
    does. targets, sources [P] int64: addresses of the pieces. num_words [P]: their sizes in 8-byte words."""
    for piece in range(targets.shape[0]):
        extent = (num_words[piece],)
        copy_and_sum(carray(_words_at(targets[piece]), extent), carray(_words_at(sources[piece]), extent), sums[piece])


@njit(void(uint64[::1], uint64[::1]), error_model="numpy", cache=True, nogil=True)
def sum_up(source: Any, sums: Any) -> None:
    """Adds the sum of the words of source [N] (uint64) to sums[0] and the sum of index * word to sums[1], both modulo 2**64. It
    computes the same sums as copy_and_sum, without a copy."""
    plain, weighted = np.uint64(0), np.uint64(0)
    for index in range(source.shape[0]):
        word = source[index]
        plain += word
        weighted += word * np.uint64(index)
    sums[0] += plain
    sums[1] += weighted
