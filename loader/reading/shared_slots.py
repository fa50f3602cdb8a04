"""Defines the layout of the memory through which the ranks (devices) of a split model share reads (loader/reading/shared_reads.py).

The memory begins with words (int64) of each rank, which only that rank writes. They say whether the rank has left, how many of its
reads have ended, the numbers (plus 1) and checksums of the reads in its slots, and, for each rank, how many of that rank's reads it
has taken. After the words of all ranks come the slots of each rank. At the beginning all memory is zero.

Further memory of the same layout follows if several ranks of a stage have the same experts: one for each part of the experts.
"""

from __future__ import annotations

NUM_SLOTS = 3  # of each rank: one for each thread that reads
LEFT, ENDED, NUMBERS, KEYS, TAKEN = 0, 1, 2, 2 + NUM_SLOTS, 2 + 2 * NUM_SLOTS  # the first columns of a rank's words

_PAGE_BYTES = 4096
_LINE_WORDS = 8  # a cache line, so that writing one rank's words does not invalidate another one's


def num_words(size: int) -> int:
    """Returns how many control words (int64) each of `size` ranks (devices of a split model) has in the memory through which ranks
    share reads."""
    return -(-(TAKEN + size) // _LINE_WORDS) * _LINE_WORDS


def words_bytes(size: int) -> int:
    """Returns the bytes of the control words of all `size` ranks (devices of a split model) in the memory through which they share
    reads, a multiple of the page size."""
    return -(-size * num_words(size) * 8 // _PAGE_BYTES) * _PAGE_BYTES


def shared_reads_bytes(size: int, slot_bytes: int) -> int:
    """Returns the bytes of the memory through which `size` ranks (devices of a split model) share reads of up to slot_bytes bytes;
    0 for one rank. Pages that nobody touches take no memory."""
    return words_bytes(size) + size * NUM_SLOTS * slot_bytes if size > 1 else 0


def stage_reads_bytes(size: int, expert_parts: int, slot_bytes: int) -> int:
    """Returns the bytes of the memory through which the ranks (devices) of a pipeline stage share reads of up to slot_bytes bytes.
    size: number of ranks. expert_parts: number of parts, of whole experts, into which the experts of a layer are divided."""
    of_experts = expert_parts * shared_reads_bytes(size // expert_parts, slot_bytes) if expert_parts > 1 else 0
    return shared_reads_bytes(size, slot_bytes) + of_experts
