"""Computes checksums of memory that reveal accidental damage. They do not protect against deliberate changes.

The checksum of a piece of memory has two parts: the sum of its 8-byte words w (the last one padded with zeros) and the sum of index
* w, both modulo 2**64. So a changed, lost or exchanged word changes the checksum.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

_STEP_WORDS = 1 << 15  # words summed at a time, few enough to stay in the cache


def of(source: Any) -> int:
    """Returns the 128-bit checksum of a uint8 array."""
    sums = np.zeros(2, np.uint64)
    whole = len(source) // 8 * 8
    add_words(source[:whole], sums)
    add_rest(source[whole:], whole // 8, sums)
    return joined(sums)


def joined(sums: Any) -> int:
    return int(sums[0]) << 64 | int(sums[1])


def add_words(source: Any, sums: Any) -> None:
    """Adds the 8-byte words of `source` to the two sums of a checksum, in place: to the first the words w, to the second index * w,
    both modulo 2**64. Indices begin at 0. source: uint8, a multiple of 8 bytes. sums: uint64 [2]."""
    for begin in range(0, len(source) // 8, _STEP_WORDS):
        words = np.frombuffer(source[8 * begin : 8 * (begin + _STEP_WORDS)].tobytes(), np.uint64)
        index = np.arange(begin, begin + len(words), dtype=np.uint64)
        sums += np.array([words.sum(dtype=np.uint64), (words * index).sum(dtype=np.uint64)])


def add_rest(rest: Any, num_words: int, sums: Any) -> None:
    """Adds the last bytes of a piece, fewer than 8 and padded with zeros to a word, to the two sums of its checksum (uint64 [2]),
    in place. num_words: the number of whole words before them, which is the index of this word."""
    if len(rest):
        last = np.zeros(8, np.uint8)
        last[: len(rest)] = rest
        word = last.view(np.uint64)
        sums += np.concatenate((word, word * np.uint64(num_words)))


def combined(pieces: Sequence[int]) -> int:
    """Combines the 128-bit checksums of consecutive pieces of memory, in their order, into one 64-bit checksum, which is never
    0."""
    digest = hashlib.blake2b(b"".join(piece.to_bytes(16, "little") for piece in pieces), digest_size=8)
    return int.from_bytes(digest.digest(), "little") or 1
