"""Computes the checksum of memory on the GPU (Triton), so that no CPU core reads what the bus brings. Reference implementation:
loader/checksum.py.

Shapes: N 8-byte words, P programs. Sums are modulo 2**64, as int64 arithmetic is.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# Enough to be several times as fast as any bus, few enough to leave the multiprocessors to the steps.
NUM_PROGRAMS = 32
BLOCK_WORDS = 2048


@triton.jit(do_not_specialize=["num_words"])
def _sum_kernel(
    words,  # [N] int64
    out,  # [P, 2] int64
    num_words,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    plain = tl.zeros([BLOCK], dtype=tl.int64)
    weighted = tl.zeros([BLOCK], dtype=tl.int64)
    for begin in range(program * BLOCK, num_words, tl.num_programs(0) * BLOCK):
        index = begin + tl.arange(0, BLOCK).to(tl.int64)
        word = tl.load(words + index, mask=index < num_words, other=0)
        plain += word
        weighted += word * index
    tl.store(out + program * 2, tl.sum(plain, axis=0))
    tl.store(out + program * 2 + 1, tl.sum(weighted, axis=0))


def partial_sums(words: Tensor, out: Tensor) -> None:
    """Writes the partial sums of words [N] int64 to out [P, 2] int64. Added up over P, they are the sum of the words and the sum of
    index * word."""
    _sum_kernel[(len(out),)](words, out, words.numel(), BLOCK=BLOCK_WORDS, num_warps=8)


def new_partial_sums(device: torch.device | str) -> Tensor:
    """Returns partial sums [P, 2] that are all 0."""
    return torch.zeros(NUM_PROGRAMS, 2, dtype=torch.int64, device=device)
