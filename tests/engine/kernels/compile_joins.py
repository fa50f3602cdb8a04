"""Prints what decode attention that joins pieces is compiled to (PTX) for compute capabilities, on a machine without a GPU, as one
JSON object: from each capability to its text.

usage: python -m tests.engine.kernels.compile_joins CAPABILITY… (not under TRITON_INTERPRET)
"""

from __future__ import annotations

import json
import sys

import torch

from engine.cuda.kernels import entry, tiles, triton_decode
from engine.cuda.launches import recorded

HEADS, KV_HEADS, HEAD_DIM, ROWS, BLOCK_TOKENS = 32, 8, 128, 8, 16


def ptx_of(capability: int) -> str:
    """Returns what the kernel is compiled to for a compute capability."""
    for kernel in (triton_decode._split_kernel, triton_decode._piece_kernel):
        kernel.device_caches.clear()  # which do not know the capability
    dtype, ints = torch.bfloat16, torch.zeros(ROWS, dtype=torch.int32)
    qkv = torch.zeros(ROWS, (HEADS + 2 * KV_HEADS) * HEAD_DIM, dtype=dtype)
    out, table = torch.zeros(ROWS, HEADS * HEAD_DIM, dtype=dtype), torch.zeros(ROWS, 64, dtype=torch.int32)
    kv = torch.zeros(1, 1, 2, KV_HEADS, BLOCK_TOKENS, HEAD_DIM, dtype=dtype)
    tile = tiles.entry_of(tiles.DECODE_KERNEL, HEAD_DIM, tiles.HALF, False, capability).tile._replace(joins=True)
    with recorded(capability) as launches, tiles.forced(tile):
        work = entry.split_contexts(ints, 0, 132, KV_HEADS)
        triton_decode.decode_attention(qkv, kv, None, 0, HEADS, table, ints, work, 0.1, 0.0, None, False, out)
    (piece,) = (launch for launch in launches.values() if launch.name == "_piece_kernel")
    return str(piece.compile().asm["ptx"])


if __name__ == "__main__":
    print(json.dumps({capability: ptx_of(int(capability)) for capability in sys.argv[1:]}))
