"""Copies of host memory that are checked as they are made: reading the source once serves both.

The checksum of a piece is over its 8-byte words w (the last one padded with zeros): their sum and the sum of index * w, both modulo
2**64, so a changed, lost or exchanged word shows. It guards against accidents, not against anyone.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

_STEP_WORDS = 1 << 15  # of the reference: what stays in the cache between the copy and the sums


@functools.cache
def _kernel() -> Callable[[Any, Any, Any], None] | None:
    if importlib.util.find_spec("numba") is None:
        return None
    from engine.kernels.cpu_copy import copy_and_sum

    return copy_and_sum


def copy(target: Any, source: Any) -> int:
    """uint8 arrays of one length. Returns the checksum of `source`; releases the GIL."""
    sums = np.zeros(2, np.uint64)
    whole = len(source) // 8 * 8
    kernel = _kernel()
    if kernel is not None and target.ctypes.data % 8 == source.ctypes.data % 8 == 0:
        kernel(target[:whole].view(np.uint64), source[:whole].view(np.uint64), sums)
    else:
        _copy_and_sum(target[:whole], source[:whole], sums)
    target[whole:] = source[whole:]
    _add_rest(source, whole, sums)
    return int(sums[0]) << 64 | int(sums[1])


def of(source: Any) -> int:
    """The checksum of a uint8 array without copying it."""
    sums = np.zeros(2, np.uint64)
    whole = len(source) // 8 * 8
    _sum(source[:whole], sums)
    _add_rest(source, whole, sums)
    return int(sums[0]) << 64 | int(sums[1])


def _add_rest(source: Any, whole: int, sums: Any) -> None:
    if whole < len(source):
        last = np.zeros(8, np.uint8)
        last[: len(source) - whole] = source[whole:]
        word = last.view(np.uint64)
        sums += np.concatenate((word, word * np.uint64(whole // 8)))


def _copy_and_sum(target: Any, source: Any, sums: Any) -> None:
    """The twin of the kernel, on numpy alone."""
    np.copyto(target, source)
    _sum(source, sums)


def _sum(source: Any, sums: Any) -> None:
    for begin in range(0, len(source) // 8, _STEP_WORDS):
        words = np.frombuffer(source[8 * begin : 8 * (begin + _STEP_WORDS)].tobytes(), np.uint64)
        index = np.arange(begin, begin + len(words), dtype=np.uint64)
        sums += np.array([words.sum(dtype=np.uint64), (words * index).sum(dtype=np.uint64)])


def combined(pieces: Sequence[int]) -> int:
    """One 64-bit number, never 0, for the checksums of consecutive pieces."""
    digest = hashlib.blake2b(b"".join(piece.to_bytes(16, "little") for piece in pieces), digest_size=8)
    return int.from_bytes(digest.digest(), "little") or 1
