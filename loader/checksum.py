"""Checksums of memory, against accidents and not against anyone.

A piece's is over its 8-byte words w (the last one padded with zeros): their sum and the sum of index * w, both modulo 2**64, so a
changed, lost or exchanged word shows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

_STEP_WORDS = 1 << 15  # at a time: what stays in the cache


def of(source: Any) -> int:
    """The checksum of a uint8 array, 128 bits."""
    sums = np.zeros(2, np.uint64)
    whole = len(source) // 8 * 8
    add_words(source[:whole], sums)
    add_rest(source[whole:], whole // 8, sums)
    return joined(sums)


def joined(sums: Any) -> int:
    return int(sums[0]) << 64 | int(sums[1])


def add_words(source: Any, sums: Any) -> None:
    """source: whole words, as uint8; sums [2] += theirs."""
    for begin in range(0, len(source) // 8, _STEP_WORDS):
        words = np.frombuffer(source[8 * begin : 8 * (begin + _STEP_WORDS)].tobytes(), np.uint64)
        index = np.arange(begin, begin + len(words), dtype=np.uint64)
        sums += np.array([words.sum(dtype=np.uint64), (words * index).sum(dtype=np.uint64)])


def add_rest(rest: Any, num_words: int, sums: Any) -> None:
    """What is left behind so many whole words, less than one."""
    if len(rest):
        last = np.zeros(8, np.uint8)
        last[: len(rest)] = rest
        word = last.view(np.uint64)
        sums += np.concatenate((word, word * np.uint64(num_words)))


def combined(pieces: Sequence[int]) -> int:
    """One 64-bit number, never 0, for the checksums of consecutive pieces."""
    digest = hashlib.blake2b(b"".join(piece.to_bytes(16, "little") for piece in pieces), digest_size=8)
    return int.from_bytes(digest.digest(), "little") or 1
