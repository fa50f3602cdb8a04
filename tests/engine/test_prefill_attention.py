"""The attention kernel for prompts gives the reference implementation's results, for various head sizes, query groups, windows,
contexts and numbers of shares that the work is divided into.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from engine.cpu.products import array
from engine.ops import reference
from tests.engine.cpu_ops import ops

pytest.importorskip("numba")
from engine.cpu.kernels import amx

LAYERS, LAYER = 2, 1


@pytest.fixture(scope="module", autouse=True)
def kernels() -> Iterator[None]:
    for dtype in ("float32", "bfloat16"):
        ops.prepare(dtype, 2)
    yield
    ops.set_num_threads(1)


@pytest.mark.parametrize(
    ("dtype", "use_tiles"),
    [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)],
    ids=["float32", "bfloat16", "bfloat16-tiles"],
)
@pytest.mark.parametrize("num_shares", [1, 2, 5])
@pytest.mark.parametrize(("context", "num_tokens"), [(17, 17), (130, 130), (513, 40), (700, 257), (1000, 1)])
@pytest.mark.parametrize(
    ("kv_heads", "group", "head_dim", "block_tokens", "reach", "softcap", "has_sinks"),
    [
        (2, 1, 64, 16, 0, 0.0, False),
        (1, 8, 128, 16, 0, 0.0, False),
        (3, 4, 96, 32, 0, 30.0, False),
        (2, 7, 80, 8, 300, 0.0, False),
        (1, 3, 40, 4, 17, 5.0, False),
        (1, 5, 256, 512, 0, 0.0, False),
        (1, 40, 6, 16, -130, 0.0, False),
        (1, 40, 64, 16, 130, 0.0, False),
        (2, 3, 64, 16, -200, 0.0, False),
        (1, 8, 64, 16, 128, 0.0, True),
        (1, 3, 40, 4, 0, 5.0, True),
    ],
)
def test_is_the_twins(
    dtype: torch.dtype,
    use_tiles: bool,
    num_shares: int,
    context: int,
    num_tokens: int,
    kv_heads: int,
    group: int,
    head_dim: int,
    block_tokens: int,
    reach: int,
    softcap: float,
    has_sinks: bool,
) -> None:
    """The kernel's output equals the reference implementation's, and outputs of other tokens are left alone. It reads nothing else:
    positions after the context or before what is seen, other rows' blocks and other layers hold NaN."""
    if use_tiles and not amx.may_use_tiles():
        pytest.skip("no AMX for this process: tiles cannot be run")
    if use_tiles and not amx.fits_tiles(block_tokens, head_dim):
        return  # cpu.py uses the kernel without tiles here
    generator = torch.Generator().manual_seed(head_dim)
    heads, before, others = kv_heads * group, 3, 4
    num_blocks = -(-context // block_tokens)
    kv = torch.full((num_blocks + others, LAYERS, 2, kv_heads, block_tokens, head_dim), torch.nan, dtype=dtype)
    table = np.random.default_rng(1).permutation(num_blocks + others).astype(np.int32)[: 2 * num_blocks]
    table = np.resize(table, (2, num_blocks)) if len(table) < 2 * num_blocks else table.reshape(2, num_blocks)
    table[0] = table[1][::-1]  # row 0 is another row, which this call does not compute
    first = reference.first_seen(context - num_tokens + 1, reach)
    for position in range(first, context):
        block, place = table[1, position // block_tokens], position % block_tokens
        kv[block, LAYER, :, :, place] = torch.randn(2, kv_heads, head_dim, generator=generator).to(dtype)
    table[1, : first // block_tokens] = -1
    qkv = (torch.randn(before + num_tokens + 1, (heads + 2 * kv_heads) * head_dim, generator=generator) * 2).to(dtype)
    wanted, given = (torch.full((len(qkv), heads * head_dim), 7.0).to(dtype) for _ in range(2))
    own = slice(before, before + num_tokens)
    query = qkv[own, : heads * head_dim].view(num_tokens, heads, head_dim).transpose(0, 1)
    scale = head_dim**-0.5
    blocks, to = torch.from_numpy(table[1]), wanted[own].view(num_tokens, heads, head_dim)
    sinks = torch.randn(heads, generator=generator) * 4 if has_sinks else None
    reference.long_row_attention(query, kv, LAYER, blocks, context, reach, scale, softcap, to, 256, None, sinks)
    name = "prefill_tiles" if use_tiles else "prefill_attention"
    kernel = getattr(ops.kernels, f"{name}_{'serial' if num_shares == 1 else 'parallel'}")
    sizes = (LAYERS, LAYER, heads, kv_heads, block_tokens, head_dim)
    arrays = [array(x) for x in (qkv, kv.view(-1), given)]
    # row 0 is short enough to be left to the paged attention kernel
    rows = (np.array(x, np.int32) for x in ((0, before), (0, num_tokens), (context, context)))
    how = (reach, scale, softcap, np.empty(0, np.float32) if sinks is None else sinks.numpy())
    kernel(arrays[0], arrays[1], *sizes, table, *rows, 0, *how, num_shares, arrays[2])
    tolerance = 5e-6 if dtype is torch.float32 else 2e-2
    torch.testing.assert_close(given.float(), wanted.float(), rtol=tolerance, atol=tolerance)
