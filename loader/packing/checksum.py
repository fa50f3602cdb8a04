"""Computes checksums of memory that reveal accidental damage. They do not protect against deliberate changes.

The checksum of a piece of memory consists of two sums over its 8-byte words w, the last one padded with zeros: the sum of w and the
sum of index * w, both modulo 2**64. So a word that is changed, lost or exchanged with another one changes the checksum.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

_STEP_WORDS = 1 << 15  # words summed at a time, few enough to stay in the cache


def of(source: Any) -> int:
    """Returns the 128-bit checksum of a uint8 array: two sums of 64 bits over its 8-byte words."""
    sums = np.zeros(2, np.uint64)
    whole = len(source) // 8 * 8
    add_words(source[:whole], sums)
    add_rest(source[whole:], whole // 8, sums)
    return joined(sums)


def joined(sums: Any) -> int:
    return int(sums[0]) << 64 | int(sums[1])


def add_words(source: Any, sums: Any) -> None:
    """Adds the 8-byte words w of `source` to a checksum in place: w to the first of its two sums and index * w to the second, both
    modulo 2**64. Indices begin at 0. source: uint8, a multiple of 8 bytes. sums: uint64 [2]."""
    for begin in range(0, len(source) // 8, _STEP_WORDS):
        words = np.frombuffer(source[8 * begin : 8 * (begin + _STEP_WORDS)].tobytes(), np.uint64)
        index = np.arange(begin, begin + len(words), dtype=np.uint64)
        sums += np.array([words.sum(dtype=np.uint64), (words * index).sum(dtype=np.uint64)])


def add_rest(rest: Any, num_words: int, sums: Any) -> None:
    """Adds the last bytes of a piece of memory, which are fewer than 8, to the piece's checksum in place. They count as an 8-byte
    word that is padded with zeros. rest: these bytes, uint8, perhaps none. num_words: the number of whole words before them, which
    is the padded word's index. sums: the two sums of the checksum, uint64 [2]."""
    if len(rest):
        last = np.zeros(8, np.uint8)
        last[: len(rest)] = rest
        word = last.view(np.uint64)
        sums += np.concatenate((word, word * np.uint64(num_words)))


def combined(pieces: Sequence[int]) -> int:
    """Returns one 64-bit checksum, never 0, for consecutive pieces of memory. pieces: the pieces' 128-bit checksums, in the order
    of the pieces."""
    digest = hashlib.blake2b(b"".join(piece.to_bytes(16, "little") for piece in pieces), digest_size=8)
    return int.from_bytes(digest.digest(), "little") or 1
