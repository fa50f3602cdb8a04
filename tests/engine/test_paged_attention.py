"""The paged attention kernel for decoding gives the reference implementation's results, for various head sizes, query groups,
windows, context lengths and numbers of shares that the work is divided into.
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
@pytest.mark.parametrize("num_shares", [1, 2, 5, 64])
@pytest.mark.parametrize(
    ("kv_heads", "group", "head_dim", "block_tokens", "reach", "softcap", "has_sinks"),
    [
        (2, 1, 64, 16, 0, 0.0, False),
        (1, 8, 128, 16, 0, 0.0, False),
        (3, 4, 96, 32, 0, 30.0, False),
        (2, 7, 80, 8, 300, 0.0, False),
        (1, 3, 40, 4, 17, 5.0, False),
        (1, 5, 256, 512, 0, 0.0, False),
        (2, 2, 6, 16, -400, 0.0, False),
        (2, 16, 64, 16, 0, 0.0, False),
        (2, 3, 96, 32, -70, 20.0, False),
        (2, 8, 64, 16, 128, 0.0, True),
        (1, 3, 40, 4, 0, 5.0, True),
    ],
)
def test_is_the_twins(
    dtype: torch.dtype,
    use_tiles: bool,
    num_shares: int,
    kv_heads: int,
    group: int,
    head_dim: int,
    block_tokens: int,
    reach: int,
    softcap: float,
    has_sinks: bool,
) -> None:
    """The kernel's output equals the reference implementation's. It reads nothing else: positions after a row's context, and all
    blocks outside the table, hold NaN."""
    if use_tiles and not amx.may_use_tiles():
        pytest.skip("no AMX for this process: tiles cannot be run")
    if use_tiles and not amx.fits_tiles(block_tokens, head_dim):
        return  # cpu.py uses the kernel without tiles here
    generator = torch.Generator().manual_seed(head_dim)
    contexts = np.array([1, 700, 16, 255, 513, 257], np.int32)
    heads, num_rows = kv_heads * group, len(contexts)
    blocks_per_row = -(-int(contexts.max()) // block_tokens)
    shape = (num_rows * blocks_per_row, LAYERS, 2, kv_heads, block_tokens, head_dim)
    kv = torch.randn(shape, generator=generator).to(dtype)
    table = np.random.default_rng(1).permutation(shape[0]).astype(np.int32).reshape(num_rows, blocks_per_row)
    for row, context in enumerate(contexts.tolist()):
        for number, block in enumerate(table[row].tolist()):
            kv[block, :, :, :, max(0, context - number * block_tokens) :] = torch.nan
    rows = np.arange(num_rows, dtype=np.int32)
    tokens = rows[::-1].copy()
    qkv = (torch.randn(num_rows, (heads + 2 * kv_heads) * head_dim, generator=generator) * 2).to(dtype)
    wanted, given = torch.zeros(num_rows, heads * head_dim).to(dtype), torch.zeros(num_rows, heads * head_dim).to(dtype)
    scale = head_dim**-0.5
    columns = (torch.from_numpy(x) for x in (table, tokens, rows, contexts))
    sinks = torch.randn(heads, generator=generator) * 4 if has_sinks else None
    reference.paged_attention(qkv, kv, LAYER, heads, *columns, reach, scale, softcap, wanted, sinks)
    kernel = ops.kernels.paged_attention_serial if num_shares == 1 else ops.kernels.paged_attention_parallel
    sizes = (LAYERS, LAYER, heads, kv_heads, block_tokens, head_dim)
    arrays = [array(x) for x in (qkv, kv.view(-1), given)]
    how = (reach, scale, softcap, np.empty(0, np.float32) if sinks is None else sinks.numpy())
    kernel(arrays[0], arrays[1], *sizes, table, tokens, rows, contexts, *how, use_tiles, num_shares, arrays[2])
    tolerance = 5e-6 if dtype is torch.float32 else 2e-2
    torch.testing.assert_close(given.float(), wanted.float(), rtol=tolerance, atol=tolerance)


def test_tiles_serve_what_fits_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """AMX tiles are used for bfloat16 keys that fill whole tiles, if the process may use AMX."""
    kernels = ops.kernels
    bfloat16, float32 = np.zeros((1, 64), np.uint16), np.zeros((1, 64), np.float32)
    monkeypatch.setattr(kernels, "may_use_tiles", lambda: True)
    assert kernels._uses_tiles(bfloat16, 16, 64)
    assert kernels._uses_tiles(bfloat16, 512, 96)
    assert not kernels._uses_tiles(bfloat16, 8, 64)
    assert not kernels._uses_tiles(bfloat16, 16, 80)
    assert not kernels._uses_tiles(float32, 16, 64)
    monkeypatch.setattr(kernels, "may_use_tiles", lambda: False)
    assert not kernels._uses_tiles(bfloat16, 16, 64)
