"""Defines the layout of the memory through which the ranks of a split model (the devices of one pipeline stage) exchange their
partial results.

The memory begins with a line of LINE_BYTES for each rank, which holds three int64: the number of pieces (contents of a buffer) that
the rank has published, the number of other ranks that sleep until that number grows, and the time at which the rank began its
latest step. Then come two buffers for each rank, which the rank fills alternately. All memory is zero at the beginning."""

from __future__ import annotations

LINE_BYTES = 64  # a cache line, so that writing one rank's counter does not invalidate another one's
BUFFER_BYTES = 256 << 10  # 64 tokens of a model of width 2,048 in bfloat16; larger tensors go in pieces


def rank_memory_bytes(size: int, buffer_bytes: int = BUFFER_BYTES) -> int:
    """Returns the bytes of the memory through which `size` ranks exchange their partial results. buffer_bytes: size of each of a
    rank's two buffers. Raises ValueError if buffer_bytes is not a positive multiple of LINE_BYTES."""
    if buffer_bytes <= 0 or buffer_bytes % LINE_BYTES:
        raise ValueError(f"buffer_bytes {buffer_bytes} is not a multiple of {LINE_BYTES}")
    return size * (LINE_BYTES + 2 * buffer_bytes)


def buffer_bytes_of(num_bytes: int, size: int) -> int:
    """Returns the size of each buffer in a memory of num_bytes bytes through which `size` ranks exchange partial results; the
    inverse of rank_memory_bytes. Raises ValueError if no buffer size gives that number of bytes."""
    buffer_bytes = (num_bytes // size - LINE_BYTES) // 2
    if rank_memory_bytes(size, buffer_bytes) != num_bytes:
        raise ValueError(f"{num_bytes} bytes are not the memory of {size} ranks with buffers of one size")
    return buffer_bytes
