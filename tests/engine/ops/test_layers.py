"""The CPU kernels for norms, activations, rotary embeddings and attention give the results of their reference implementations in
torch.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.cpu.batch import GroupMemory, HostBatch, build_batch, padded_rows
from engine.ops import reference
from engine.ops.ops import HeadNorms, Rotary
from scheduler.batch.plan import BatchPlan
from tests.engine.cpu_ops import ops
from tests.engine.model_bench import make_table
from tests.engine.ops.twins import both, random, same, share_everything

pytest.importorskip("numba")
HEADS, KV_HEADS, HEAD_DIM, LAYERS, BLOCK_TOKENS = 6, 2, 16, 2, 4


def make_batch(
    dtype: torch.dtype, rows: list[tuple[int, int, int]], padded: bool = False, window: int = 0, pairs: int = HEAD_DIM // 2
) -> HostBatch:
    columns = np.array(rows, np.int32)
    plan = BatchPlan(0, "m", columns[:, 0].copy(), columns[:, 1].copy(), columns[:, 2].copy(), np.ones(len(rows), np.bool_))
    kv = random(256, LAYERS, 2, KV_HEADS, BLOCK_TOKENS, HEAD_DIM, dtype=dtype)
    flat = kv.view(-1).view(torch.uint16).numpy() if dtype is torch.bfloat16 else kv.view(-1).numpy()
    places = [(0, layer) for layer in range(LAYERS)]
    inv_freq = 1.0 / (10000.0 ** (torch.arange(0, HEAD_DIM, 2).float() / HEAD_DIM))
    return build_batch(plan, make_table(), [GroupMemory(kv, flat, Rotary(inv_freq[:pairs]), window)], places, ops.cos_sin, padded)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("around_one", [False, True])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 100.0])
def test_rms_norms(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, scale: float, around_one: bool, threads: int) -> None:
    ops.set_num_threads(threads)
    share_everything(monkeypatch)
    x, weight = random(7, 77, dtype=dtype, scale=scale), random(77, dtype=dtype)
    same(*both(monkeypatch, lambda: ops.rms_norm(x, weight, 1e-5, around_one)))

    def add() -> Tensor:
        residual = random(7, 77, dtype=dtype, scale=3.0).clone()
        return torch.cat((ops.add_rms_norm(x, residual, weight, 1e-5, around_one), residual))

    same(*both(monkeypatch, add))


@pytest.mark.parametrize("parts", [1, 2])
def test_norms_by_sums_of_squares(dtype: torch.dtype, parts: int) -> None:
    """Each part of the columns is divided by the root of the mean over all parts."""
    whole = random(7, 2 * 48 + 2 * 16 + 10, dtype=dtype)
    weights = random(2 * 48, dtype=dtype), random(2 * 16, dtype=dtype)
    expected = whole.clone()
    ops.norm_columns(expected, 0, weights[0], 1e-5, False)
    ops.norm_columns(expected, 96, weights[1], 1e-5, False)
    columns = [torch.cat([one.chunk(parts)[part] for one in torch.arange(128).split([96, 32])]) for part in range(parts)]
    rest = torch.arange(128, 138)
    own = [whole[:, torch.cat([some, rest])].contiguous() for some in columns]
    widths = 96 // parts, 32 // parts
    squares = torch.stack([ops.column_squares(one, widths) for one in own]).sum(0)
    assert squares.dtype is torch.float32
    for part, one in enumerate(own):
        ops.norm_columns_by(one, tuple(weight.chunk(parts)[part] for weight in weights), squares, parts, 1e-5)
        same(one[:, :-10], expected[:, columns[part]])
        assert torch.equal(one[:, -10:], whole[:, -10:])


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 100.0])
def test_layer_norms(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, scale: float, threads: int) -> None:
    ops.set_num_threads(threads)
    share_everything(monkeypatch)
    x, weight, bias = random(7, 77, dtype=dtype, scale=scale) + scale, random(77, dtype=dtype), random(77, dtype=dtype)
    same(*both(monkeypatch, lambda: ops.layer_norm(x, weight, None, 1e-5)))
    same(*both(monkeypatch, lambda: ops.layer_norm(x[:, :48].contiguous(), weight[:48], bias[:48], 1e-5)))

    def add() -> Tensor:
        residual = random(7, 77, dtype=dtype, scale=3.0).clone()
        normed = [
            ops.add_layer_norm(x, residual, weight, bias, 1e-5, 0.22),
            ops.add_rms_norm(x, residual, weight, 1e-5, False, 0.22),
        ]
        return torch.cat((*normed, residual))

    same(*both(monkeypatch, add))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("scale", [0.1, 3.0, 60.0])
def test_gated_activations(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, scale: float, threads: int) -> None:
    ops.set_num_threads(threads)
    share_everything(monkeypatch)
    gate_up = random(5, 150, dtype=dtype, scale=scale)
    same(*both(monkeypatch, lambda: ops.silu_and_mul(gate_up)))
    gate_up[:, 75:] /= scale  # where gelu is almost 0, torch's has no correct digit, and a large `up` would make that visible
    same(*both(monkeypatch, lambda: ops.gelu_and_mul(gate_up)))
    same(*both(monkeypatch, lambda: ops.gelu(gate_up)))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("pairs", [HEAD_DIM // 2, 6, 3])
@pytest.mark.parametrize("kind", ["no norms", "norms", "norms around one", "norms, neighbours", "norms of values"])
def test_rope_and_store(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, kind: str, pairs: int, threads: int) -> None:
    ops.set_num_threads(threads)
    share_everything(monkeypatch)
    weights = random(HEAD_DIM, dtype=dtype), random(HEAD_DIM, dtype=dtype) + 1
    of_values = random(HEAD_DIM, dtype=dtype) if kind == "norms of values" else None
    norms = None if kind == "no norms" else HeadNorms(*weights, 1e-5, kind == "norms around one", of_values)

    def call() -> Tensor:
        batch = make_batch(dtype, [(0, 17, 1), (1, 5, 4), (3, 0, 9)], padded=True, pairs=pairs)
        qkv = random(len(batch.input_ids), (HEADS + 2 * KV_HEADS) * HEAD_DIM, dtype=dtype).clone()
        ops.rope_and_store(qkv, norms, 1, HEADS, batch, kind == "norms, neighbours")
        queries = random(len(batch.input_ids), HEADS * HEAD_DIM, dtype=dtype).clone()
        ops.rope(queries, norms, 1, HEADS, batch, kind == "norms, neighbours")
        return torch.cat((qkv[: batch.num_tokens].flatten(), queries.flatten(), batch.groups[0].kv.flatten()))

    same(*both(monkeypatch, call))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    "rows",
    [
        [(0, 0, 1)],
        [(0, 99, 1), (1, 3, 1), (2, 4, 1), (3, 15, 1)],
        [(0, 99, 1), (1, 3, 5), (2, 20, 40), (4, 0, 30)],
    ],
    ids=["first-token", "decode", "mixed"],
)
@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (1, 0.0), (7, 0.0), (8, 5.0), (0, 5.0), (-24, 0.0)])
def test_attention(
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    rows: list[tuple[int, int, int]],
    threads: int,
    window: int,
    softcap: float,
) -> None:
    ops.set_num_threads(threads)
    share_everything(monkeypatch)
    batch = make_batch(dtype, rows, padded=True, window=window)
    qkv = random(len(batch.input_ids), (HEADS + 2 * KV_HEADS) * HEAD_DIM, dtype=dtype, scale=2.0)
    same(*both(monkeypatch, lambda: ops.attention(qkv, 1, HEADS, HEAD_DIM**-0.5, softcap, batch)))


@pytest.mark.parametrize("window", [0, 3, -8, 30])
def test_attention_reads_nothing_beyond_context_and_window(dtype: torch.dtype, window: int) -> None:
    """Attention reads no block and no position that does not belong to its rows: these hold NaN. Blocks before the window have
    index -1."""
    batch = make_batch(dtype, [(0, 5, 1), (1, 2, 3), (2, 50, 1), (3, 30, 40)], window=window)
    owned = torch.zeros(batch.groups[0].kv.shape[0], BLOCK_TOKENS, dtype=torch.bool)
    for row, context in enumerate(batch.contexts.tolist()):
        first = reference.first_seen(context - int(batch.num_new[row]) + 1, window)
        for position in range(first, context):
            owned[int(batch.groups[0].block_table[row, position // BLOCK_TOKENS]), position % BLOCK_TOKENS] = True
        batch.groups[0].block_table[row, : first // BLOCK_TOKENS] = -1
    batch.groups[0].kv.permute(0, 4, 1, 2, 3, 5)[~owned] = torch.nan
    qkv = random(len(batch.input_ids), (HEADS + 2 * KV_HEADS) * HEAD_DIM, dtype=dtype)
    for softcap in (0.0, 5.0):
        assert torch.isfinite(ops.attention(qkv, 0, HEADS, 0.25, softcap, batch)).all()


def test_padded_row_counts_are_few_and_not_much_larger() -> None:
    sizes = [padded_rows(n) for n in range(1, 1025)]
    assert all(n <= size <= n * 1.8 for n, size in enumerate(sizes, start=1))
    assert len(set(sizes)) < 64
    assert padded_rows(0) == 0


def test_float16_runs_on_the_reference() -> None:
    x = random(3, 16, dtype=torch.float16)
    assert torch.equal(ops.rms_norm(x, x[0], 1e-5), reference.rms_norm(x, x[0], 1e-5))


def test_silu_of_every_bfloat16_gate_is_the_exact_one_rounded() -> None:
    """silu is the exact value rounded, except for a few gates whose value is almost half-way between two bfloat16 numbers. Gates
    below -80 are left out, since the result is less than 1e-33."""
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    gates = every[(every.float().abs() <= 80) & (every.float().abs() >= 1e-30)]
    gates = gates[: len(gates) // 16 * 16].view(16, -1)
    exact = gates.double() * torch.sigmoid(gates.double())
    activated = ops.silu_and_mul(torch.cat((gates, torch.ones_like(gates)), 1))
    assert (activated != exact.to(torch.bfloat16)).sum() < len(every) // 1000
    assert ((activated.double() - exact).abs() <= 0.501 * 2.0**-7 * exact.abs()).all()
    ends = torch.tensor([[torch.inf, -torch.inf, torch.nan, -1000.0, 1000.0, 1.0, 1.0, 1.0, 1.0, 1.0]]).to(torch.bfloat16)
    assert [str(float(x)) for x in ops.silu_and_mul(ends)[0, :3]] == ["inf", "-inf", "nan"]
    assert ops.silu_and_mul(ends)[0, 3:].float().abs().tolist() == [pytest.approx(0.0, abs=1e-30), 1000.0]
