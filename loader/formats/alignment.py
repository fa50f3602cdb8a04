"""Aligns what lies in a model's weight range."""

from __future__ import annotations

ALIGN_BYTES = 64


def aligned(offset_bytes: int) -> int:
    return -(-offset_bytes // ALIGN_BYTES) * ALIGN_BYTES
