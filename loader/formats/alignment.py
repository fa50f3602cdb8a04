"""Rounds offsets in a model's weight range up to the alignment of tensors, 64 bytes."""

from __future__ import annotations

ALIGN_BYTES = 64


def aligned(offset_bytes: int) -> int:
    return -(-offset_bytes // ALIGN_BYTES) * ALIGN_BYTES
