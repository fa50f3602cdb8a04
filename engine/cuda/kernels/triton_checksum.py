"""Computes checksums of memory on the GPU (Triton), so that no CPU core has to read what was copied to or from the GPU. Reference
implementation: loader/packing/checksum.py.

Shapes: N pieces of memory, P programs for each. Sums are modulo 2**64, as int64 arithmetic is.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

# For each piece. Enough to be several times as fast as any bus, few enough to leave the multiprocessors to the steps.
MOST_PROGRAMS = 32
BLOCK_WORDS = 2048


@triton.jit
def _sum_kernel(
    table,  # [N, 2] int64: the address of each piece, aligned to 8 bytes, and its number of 8-byte words
    out,  # [N, P, 2] int64
    BLOCK: tl.constexpr,
):
    piece, program = tl.program_id(0), tl.program_id(1)
    words = tl.load(table + piece * 2).to(tl.pointer_type(tl.int64))
    num_words = tl.load(table + piece * 2 + 1)
    plain = tl.zeros([BLOCK], dtype=tl.int64)
    weighted = tl.zeros([BLOCK], dtype=tl.int64)
    for begin in range(program * BLOCK, num_words, tl.num_programs(1) * BLOCK):
        index = begin + tl.arange(0, BLOCK).to(tl.int64)
        word = tl.load(words + index, mask=index < num_words, other=0)
        plain += word
        weighted += word * index
    place = out + (piece * tl.num_programs(1) + program) * 2
    tl.store(place, tl.sum(plain, axis=0))
    tl.store(place + 1, tl.sum(weighted, axis=0))


def num_programs(most_words: int) -> int:
    """Returns P, the number of programs for each piece. most_words: number of 8-byte words of the largest piece."""
    return max(1, min(MOST_PROGRAMS, -(-most_words // BLOCK_WORDS)))


def partial_sums(table: Tensor, out: Tensor) -> None:
    """Writes the partial sums of N pieces of memory to out [N, P, 2] int64. Added up over P, they are the sum of a piece's words
    and the sum of index * word. table: [N, 2] int64 on the device, the address of each piece, aligned to 8 bytes, and its number of
    8-byte words."""
    _sum_kernel[out.shape[:2]](table, out, BLOCK=BLOCK_WORDS, num_warps=8)
