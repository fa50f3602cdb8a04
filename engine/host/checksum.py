"""Copies host memory and computes its checksum in the same pass, so that the source is read only once. The checksum, which
loader.packing.checksum defines, is made of two sums over the 8-byte words: that of the words, and that of index * word."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from loader.packing import checksum as loader_checksum
from loader.packing.checksum import add_rest, add_words, joined


@functools.cache
def _kernels() -> tuple[Callable[[Any, Any, Any], None], Callable[[Any, Any], None], Callable[..., None]] | None:
    if importlib.util.find_spec("numba") is None:
        return None
    from engine.host.copy_kernels import copy_and_sum, copy_and_sum_each, sum_up

    return copy_and_sum, sum_up, copy_and_sum_each


def of(source: Any) -> int:
    """Returns the checksum of `source`, a uint8 array, as loader.packing.checksum defines it. With Numba it is as fast as memory
    can be read. Releases the GIL."""
    kernels = _kernels()
    if kernels is None or source.ctypes.data % 8:
        return loader_checksum.of(source)
    sums = np.zeros(2, np.uint64)
    whole = len(source) // 8 * 8
    kernels[1](source[:whole].view(np.uint64), sums)
    add_rest(source[whole:], whole // 8, sums)
    return joined(sums)


def copy(target: Any, source: Any) -> int:
    """Copies `source` to `target`, uint8 arrays of one length, and returns the checksum of `source`. Releases the GIL."""
    sums = np.zeros(2, np.uint64)
    whole = len(source) // 8 * 8
    kernels = _kernels()
    if kernels is not None and target.ctypes.data % 8 == source.ctypes.data % 8 == 0:
        kernels[0](target[:whole].view(np.uint64), source[:whole].view(np.uint64), sums)
    else:
        _copy_and_sum(target[:whole], source[:whole], sums)
    target[whole:] = source[whole:]
    add_rest(source[whole:], whole // 8, sums)
    return joined(sums)


def copy_each(targets: Sequence[int], sources: Sequence[int], num_bytes: Sequence[int]) -> list[int] | None:
    """Copies several pieces of memory in one call and returns their checksums, in order. targets, sources: the pieces' addresses.
    num_bytes: their lengths. Returns None, with nothing copied, if an address or length is not a multiple of 8 bytes or there is no
    compiled kernel."""
    kernels = _kernels()
    pieces = np.array([targets, sources, num_bytes], np.int64)
    if kernels is None or (pieces % 8).any():
        return None
    sums = np.zeros((len(targets), 2), np.uint64)
    kernels[2](pieces[0], pieces[1], pieces[2] // 8, sums)
    return [joined(own) for own in sums]


def _copy_and_sum(target: Any, source: Any, sums: Any) -> None:
    """Copies `source` to `target` and adds the two sums of its checksum to `sums`. source, target: uint8 arrays of a whole number
    of 8-byte words. This is the reference implementation of copy_kernels.copy_and_sum, in numpy."""
    np.copyto(target, source)
    add_words(source, sums)
