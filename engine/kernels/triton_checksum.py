"""The checksum of memory on the GPU (Triton), so that no core reads what the bus brings. Twin: loader/checksum.py.

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
    """words [N] int64; out [P, 2] int64: added up over P, the sum of the words, and of index * word."""
    _sum_kernel[(len(out),)](words, out, words.numel(), BLOCK=BLOCK_WORDS, num_warps=8)


def new_partial_sums(device: torch.device | str) -> Tensor:
    """[P, 2], of nothing."""
    return torch.zeros(NUM_PROGRAMS, 2, dtype=torch.int64, device=device)
