"""One case for each Triton kernel and seed: random shapes and inputs, the kernel on a device, its torch twin on the CPU. The same
cases run interpreted (float32, float16) and on a GPU (bfloat16 too)."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels import (
    reference,
    triton_checksum,
    triton_decode,
    triton_extend,
    triton_fp8,
    triton_inputs,
    triton_linear,
    triton_rope,
    triton_rows,
    triton_sampling,
    triton_unpack,
)
from engine.memory.arena import kv_views
from engine.steps.forward_batch import Rotary
from loader import checksum, codec, sizing
from loader import frame as layout

TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
HEAD_DIMS = (64, 80, 96, 128, 256)
BLOCK_TOKENS = (8, 16, 32)


class Draw:
    """Seeded shapes and tensors of one dtype, on one device."""

    def __init__(self, seed: int, dtype: torch.dtype, device: str) -> None:
        self.shapes, self.generator = random.Random(seed), torch.Generator().manual_seed(seed)
        self.dtype, self.device = dtype, device
        self.interpreted = device == "cpu"

    def one_of(self, *values: Any) -> Any:
        return self.shapes.choice(values)

    def between(self, low: int, high: int) -> int:
        return self.shapes.randint(low, high)

    def normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=self.generator) * scale).to(self.dtype)

    def on(self, x: Tensor) -> Tensor:
        """A copy on the device."""
        return x.clone() if self.interpreted else x.to(self.device)

    def like(self, x: Tensor) -> Tensor:
        """Memory for a result: NaN, so that what is not written shows."""
        out = torch.empty(x.shape, dtype=x.dtype, device=self.device)
        return out.fill_(math.nan) if x.is_floating_point() else out.fill_(-7)


def close(actual: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    assert actual.shape == wanted.shape
    torch.testing.assert_close(actual.cpu().float(), wanted.float(), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def norms(draw: Draw) -> None:
    width, rows = draw.one_of(1, 7, 48, 64, 100, 513, 896), draw.between(1, 5)
    x, residual = draw.normal(rows, width, scale=draw.one_of(1e-2, 1.0, 50.0)), draw.normal(rows, width, scale=3.0)
    weight, around_one = draw.normal(width), draw.one_of(False, True)
    out = draw.like(x)
    triton_rows.rms_norm(draw.on(x), None, draw.on(weight), 1e-5, around_one, out)
    close(out, reference.rms_norm(x, weight, 1e-5, around_one), draw.dtype)
    added = draw.on(residual)
    triton_rows.rms_norm(draw.on(x), added, draw.on(weight), 1e-5, around_one, out)
    wanted = reference.add_rms_norm(x, residual, weight, 1e-5, around_one)
    close(out, wanted, draw.dtype)
    close(added, residual, draw.dtype)


def gates(draw: Draw) -> None:
    rows, width, scale = draw.between(1, 5), draw.one_of(1, 31, 80, 1024, 1500), draw.one_of(0.1, 3.0, 60.0)
    gate_up = draw.normal(rows, 2 * width, scale=scale)
    gate_up[:, width:] /= scale  # where gelu vanishes, torch's loses all its digits; up must not make them large
    for gelu, twin in ((False, reference.silu_and_mul), (True, reference.gelu_and_mul)):
        wanted = twin(gate_up)
        out = draw.like(wanted)
        triton_rows.gate_and_mul(draw.on(gate_up), gelu, out)
        close(out, wanted, draw.dtype)


def few_rows_linear(draw: Draw) -> None:
    rows, outputs, inputs = draw.between(1, 4), draw.one_of(1, 3, 17, 64), draw.one_of(1, 40, 512, 700, 2049, 4500)
    x, weight = draw.normal(rows, inputs), draw.normal(outputs, inputs, scale=inputs**-0.5)
    bias = draw.normal(outputs) if draw.one_of(False, True) else None
    out = draw.like(torch.empty(rows, outputs, dtype=draw.dtype))
    triton_linear.few_rows_linear(draw.on(x), draw.on(weight), None if bias is None else draw.on(bias), out)
    wanted = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    close(out, wanted, draw.dtype)


def gathers(draw: Draw) -> None:
    vocab, width, rows = draw.between(1, 90), draw.one_of(3, 64, 500, 2100), draw.between(1, 6)
    table = draw.normal(vocab, width)
    ids = torch.randint(0, vocab, (rows,), generator=draw.generator).to(draw.one_of(torch.int32, torch.int64))
    scale = draw.one_of(1.0, 22.6)
    wanted = reference.gather_rows(table, ids, scale)
    out = draw.like(wanted)
    triton_rows.gather_rows(draw.on(table), draw.on(ids), scale, out)
    close(out, wanted, draw.dtype)


@dataclass(slots=True)
class Paged:
    """KV of a few rows: blocks scattered over an arena that holds NaN everywhere else (as fp8, scales that are not finite)."""

    arena: Tensor
    view: Callable[[Tensor], tuple[Tensor, Tensor | None]]
    block_table: Tensor  # by row
    shuffled_table: Tensor  # the same, in another order
    table_rows: Tensor  # where each row is there
    contexts: list[int]
    heads: int
    layer: int

    @property
    def kv(self) -> Tensor:
        return self.view(self.arena)[0]

    @property
    def scales(self) -> Tensor | None:
        return self.view(self.arena)[1]

    @property
    def kv_heads(self) -> int:
        return self.kv.shape[3]

    @property
    def head_dim(self) -> int:
        return self.kv.shape[5]


def paged(
    draw: Draw, contexts: list[int], windows: list[int], fp8: bool, groups: tuple[int, ...] = (1, 2, 3, 4, 5, 7, 8, 17)
) -> Paged:
    """windows: positions at the end of each row that are read; what lies in blocks before them has no place (-1)."""
    head_dim, block_tokens, kv_heads = draw.one_of(*HEAD_DIMS), draw.one_of(*BLOCK_TOKENS), draw.one_of(1, 1, 2, 3)
    layers = draw.one_of(1, 2)
    layer = draw.between(0, layers - 1)
    heads = kv_heads * draw.one_of(*groups)
    num_blocks = sum(-(-c // block_tokens) for c in contexts) + 3
    kv_dtype = sizing.KV_FP8 if fp8 else str(draw.dtype).removeprefix("torch.")
    block_bytes = layers * 2 * kv_heads * block_tokens * sizing.kv_head_bytes(head_dim, kv_dtype)
    group = sizing.KVGroupSpec("full", block_tokens, block_bytes, tuple(range(layers)))
    view = partial(kv_views, group=group, kv_heads=kv_heads, head_dim=head_dim, kv_dtype=kv_dtype)
    arena = torch.full((num_blocks * block_bytes,), 0xFF, dtype=torch.uint8)
    kv, scales = view(arena)
    table = torch.full((len(contexts), max(1, max(-(-c // block_tokens) for c in contexts))), -1, dtype=torch.int32)
    places = torch.randperm(len(contexts), generator=draw.generator)
    free = torch.randperm(num_blocks, generator=draw.generator).tolist()
    for row, (context, window) in enumerate(zip(contexts, windows, strict=True)):
        for position in range(max(0, context - window), context):
            at = position // block_tokens
            if table[row, at] < 0:
                table[row, at] = free.pop()
            place = (table[row, at], slice(None), slice(None), slice(None), position % block_tokens)
            numbers = draw.normal(layers, 2, kv_heads, head_dim)
            if scales is None:
                kv[place] = numbers
            else:  # heads of very different sizes
                sizes = torch.exp2(torch.randint(-9, 1, (layers, 2, kv_heads, 1), generator=draw.generator))
                kv[place], scales[place] = reference.quantize_fp8(numbers * sizes)
    return Paged(arena, view, table, table[places.argsort()], places.int(), contexts, heads, layer)


def attended(
    qkv: Tensor,
    case: Paged,
    tokens: list[int],
    rows: list[int],
    seen: list[int],
    window: int,
    scale: float,
    softcap: float,
    sinks: Any,
) -> Tensor:
    """The twin's answer [T, H D] in float32 from the same (perhaps half precision) numbers."""
    out = torch.zeros(qkv.shape[0], case.heads * case.head_dim)
    columns = (torch.tensor(x, dtype=torch.int32) for x in (tokens, rows, seen))
    kv = case.kv.float() if case.scales is None else case.kv
    how = (window, scale, softcap, out, sinks, case.scales)
    reference.paged_attention(qkv.float(), kv, case.layer, case.heads, case.block_table, *columns, *how)
    return out


def work_lists(draw: Draw) -> None:
    """Of as many rows as a step may have."""
    rows, window, target = draw.one_of(1, draw.between(2, 64), draw.between(65, 300)), draw.one_of(0, 0, 50), draw.between(1, 60)
    contexts = torch.randint(0, draw.one_of(2, 90, 3000), (rows,), generator=draw.generator).int()
    work = triton_decode.make_work(rows, target, draw.device)
    triton_decode.split_contexts(draw.on(contexts), window, work)
    wanted = reference.split_contexts(contexts, window, target, triton_decode.SPLIT_TOKENS, rows + target)
    for actual, expected in zip((work.rows, work.begins, work.ends, work.firsts), wanted, strict=True):
        assert actual.tolist() == expected.tolist()


def decode_attention(draw: Draw, fp8: bool = False) -> None:
    window = draw.one_of(0, 0, 1, 7, 64, 100)
    contexts = [
        draw.one_of(0, 1, draw.between(2, 40), draw.between(2, 40), draw.between(60, 330)) for _ in range(draw.between(1, 4))
    ]
    case = paged(draw, contexts, [window or c for c in contexts], fp8)
    softcap, scale = draw.one_of(0.0, 0.0, 5.0), draw.one_of(case.head_dim**-0.5, 0.3)
    sinks = torch.randn(case.heads, generator=draw.generator) if draw.one_of(False, False, True) else None
    qkv = draw.normal(len(contexts), (case.heads + 2 * case.kv_heads) * case.head_dim)
    work = triton_decode.make_work(len(contexts), draw.one_of(1, 3, 8), draw.device)
    on_device = draw.on(torch.tensor(contexts, dtype=torch.int32))
    triton_decode.split_contexts(on_device, window, work)
    out = draw.like(torch.empty(len(contexts), case.heads * case.head_dim, dtype=draw.dtype))
    triton_decode.decode_attention(
        draw.on(qkv),
        *case.view(draw.on(case.arena)),
        case.layer,
        case.heads,
        draw.on(case.shuffled_table),
        draw.on(case.table_rows),
        work,
        scale,
        softcap,
        None if sinks is None else draw.on(sinks),
        draw.interpreted,
        out,
    )
    there = [row for row, context in enumerate(contexts) if context]
    close(out, attended(qkv, case, there, there, [contexts[r] for r in there], window, scale, softcap, sinks), draw.dtype)


def extend_attention(draw: Draw, fp8: bool = False) -> None:
    window = draw.one_of(0, 0, 1, 7, 33, 90)
    new = [draw.one_of(1, 5, draw.between(2, 40), draw.between(33, 70)) for _ in range(draw.between(1, 2))]
    contexts = [n + draw.one_of(0, 0, draw.between(1, 70), draw.between(64, 100)) for n in new]
    seen_of = [window + n - 1 if window else c for n, c in zip(new, contexts, strict=True)]
    case = paged(draw, contexts, seen_of, fp8, groups=(1, 2, 3, 4))
    softcap, scale = draw.one_of(0.0, 0.0, 5.0), draw.one_of(case.head_dim**-0.5, 0.3)
    sinks = torch.randn(case.heads, generator=draw.generator) if draw.one_of(False, False, True) else None
    first = draw.one_of(0, 2)  # tokens before them are others' and stay as they are
    starts = [first + sum(new[:row]) for row in range(len(new))]
    qkv = draw.normal(first + sum(new), (case.heads + 2 * case.kv_heads) * case.head_dim)
    tokens = triton_extend.tile_tokens(case.head_dim, draw.dtype)
    tiles = [(row, at) for row, n in enumerate(new) for at in range(0, n, tokens)]

    def ints(values: list[int]) -> Tensor:
        return draw.on(torch.tensor(values, dtype=torch.int32))

    out = draw.like(torch.empty(len(qkv), case.heads * case.head_dim, dtype=draw.dtype))
    triton_extend.extend_attention(
        draw.on(qkv),
        *case.view(draw.on(case.arena)),
        case.layer,
        case.heads,
        draw.on(case.shuffled_table),
        draw.on(case.table_rows),
        ints([row for row, _ in tiles]),
        ints([at for _, at in tiles]),
        ints(starts),
        ints(new),
        ints(contexts),
        window,
        scale,
        softcap,
        None if sinks is None else draw.on(sinks),
        draw.interpreted,
        out,
    )
    assert out[:first].isnan().all()
    rows = [row for row, n in enumerate(new) for _ in range(n)]
    seen = [contexts[row] - n + 1 + i for row, n in enumerate(new) for i in range(n)]
    wanted = attended(qkv, case, list(range(first, len(qkv))), rows, seen, window, scale, softcap, sinks)
    close(out[first:], wanted[first:], draw.dtype)


def rope(draw: Draw, fp8: bool = False) -> None:
    rows = draw.between(1, 5)
    case = paged(draw, [draw.between(rows, 30)], [40], fp8)
    pairs = draw.one_of(case.head_dim // 2, case.head_dim // 2, case.head_dim // 4, 3)
    rotary = Rotary(1.0 / 10000 ** (torch.arange(pairs).float() / pairs), draw.one_of(1.0, 1.2))
    positions = torch.randint(0, draw.one_of(30, 30000), (rows,), generator=draw.generator)
    turns = rotary.cos_sin(positions)
    on_device = draw.like(turns)
    triton_rope.cos_sin(draw.on(positions), draw.on(rotary.inv_freq), rotary.scale, on_device)
    torch.testing.assert_close(on_device.cpu(), turns, rtol=1e-5, atol=1e-5)
    slots = torch.randperm(case.kv.shape[0] * case.kv.shape[4], generator=draw.generator)[:rows]
    slots[draw.between(0, rows - 1)] = -1
    qkv = draw.normal(rows, (case.heads + 2 * case.kv_heads) * case.head_dim)
    query_norm, key_norm = (draw.normal(case.head_dim), draw.normal(case.head_dim)) if draw.one_of(False, True) else (None, None)
    around_one = draw.one_of(False, True)
    ours, arena, layer = draw.on(qkv), draw.on(case.arena), (case.layer, case.heads)
    weights = tuple(None if x is None else draw.on(x) for x in (query_norm, key_norm))
    triton_rope.rope_and_store(ours, draw.on(turns), *weights, around_one, 1e-6, *case.view(arena), *layer, draw.on(slots))
    reference.rope_and_store(qkv, turns, query_norm, key_norm, around_one, 1e-6, case.kv, *layer, slots, case.scales)
    queries = case.heads * case.head_dim
    close(ours[:, :queries], qkv[:, :queries], draw.dtype)
    kv, scales = case.view(arena.cpu())
    if scales is not None:
        stored_alike(case, kv, scales)
        return
    assert torch.equal(kv.isnan(), case.kv.isnan())
    close(kv.nan_to_num(0.0), case.kv.nan_to_num(0.0), draw.dtype)


def stored_alike(case: Paged, kv: Tensor, scales: Tensor) -> None:
    """Values are stored as they come, so their codes are the twin's; keys are computed first, and a difference in their last place
    may round to the next code."""
    assert case.scales is not None
    assert torch.equal(kv[:, :, 1], case.kv[:, :, 1])
    assert torch.equal(scales[:, :, 1], case.scales[:, :, 1])
    assert (kv != case.kv).float().mean() < 0.01
    ours, wanted = (reference.widen_fp8(*pair) for pair in ((kv, scales), (case.kv, case.scales)))
    assert torch.equal(ours.isnan(), wanted.isnan())
    torch.testing.assert_close(ours.nan_to_num(0.0), wanted.nan_to_num(0.0), rtol=1 / 8, atol=2e-3)


@triton.jit
def _round_kernel(x, codes, exponents, again, N: tl.constexpr, D: tl.constexpr):
    at = tl.arange(0, N)[:, None] * D + tl.arange(0, D)[None, :]
    wide = tl.load(x + at).to(tl.float32)
    exponent = triton_fp8.shared_scale(tl.max(tl.abs(wide), axis=1))
    code = triton_fp8.e4m3_of(wide * triton_fp8.scale_of(254 - exponent)[:, None])
    tl.store(codes + at, code)
    tl.store(exponents + tl.arange(0, N), exponent.to(tl.uint8))
    tl.store(again + at, triton_fp8.widened(code, tl.float32) * triton_fp8.scale_of(exponent)[:, None])


def fp8_rounding(draw: Draw) -> None:
    """Every code and every tie between two, of numbers of any size, in heads of which one number decides the scale."""
    wide = draw.one_of(torch.float32, draw.dtype)
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().nan_to_num(448.0)
    ties = (codes[:126] + codes[1:127]) / 2
    edges = torch.cat((codes, ties, -ties, ties * (1 + 1e-6), ties * (1 - 1e-6), torch.zeros(8)))
    edges = edges[torch.randperm(len(edges), generator=draw.generator)][:512].view(32, 16)
    normal = torch.randn(32, 16, generator=draw.generator) * torch.exp2(torch.randint(-30, 9, (32, 1), generator=draw.generator))
    edges[:, 0] = draw.one_of(448.0, 449.0, 300.0, 1e-3)
    x = torch.cat((edges * 2.0 ** draw.between(-14, 6), normal)).to(wide)
    wanted, exponents = reference.quantize_fp8(x)
    ours = draw.like(wanted), draw.like(exponents), draw.like(x.float())
    _round_kernel[(1,)](draw.on(x), *ours, N=64, D=16)
    assert torch.equal(ours[0].cpu(), wanted)
    assert torch.equal(ours[1].cpu(), exponents)
    assert torch.equal(ours[2].cpu(), reference.widen_fp8(wanted, exponents))
    bound = torch.maximum(x.float().abs() / 16, torch.exp2(exponents.float() - 127 - 10).unsqueeze(1))
    assert ((ours[2].cpu() - x.float()).abs() <= bound).all()


def inputs(draw: Draw) -> None:
    """Rows of one and of several tokens, padding behind them, tokens that only the device knows."""
    num_slots, block_tokens, num_blocks = draw.between(1, 6), draw.one_of(*BLOCK_TOKENS), 9
    rows = draw.between(1, num_slots)
    slots = torch.randperm(num_slots, generator=draw.generator)[:rows].int()
    slots[rows - 1 :] = draw.one_of(num_slots, int(slots[rows - 1]))
    new = [draw.one_of(1, draw.between(1, 200)) if block_tokens > 8 else 1 for _ in range(rows)]
    firsts = torch.tensor([draw.between(0, num_blocks * block_tokens - 1 - min(n, 60)) for n in new], dtype=torch.int32)
    new = [min(n, num_blocks * block_tokens - int(first)) for n, first in zip(new, firsts, strict=True)]
    starts = torch.tensor([sum(new[:row]) for row in range(rows)], dtype=torch.int32)
    token_rows = torch.repeat_interleave(torch.arange(rows), torch.tensor(new)).int()
    host_ids = torch.randint(-1, 3, (len(token_rows),), generator=draw.generator).int()
    last_ids = torch.randint(0, 1000, (num_slots + 1,), generator=draw.generator).int()
    table = torch.randint(0, 1 << 30, (num_slots + 1, num_blocks), generator=draw.generator).int()
    columns = (token_rows, host_ids, slots, firsts, starts, last_ids, table)
    wanted = reference.prepare_inputs(*columns, block_tokens)
    ours = draw.like(wanted[0].int()), draw.like(wanted[1].int()), draw.like(wanted[2].long())
    triton_inputs.prepare_inputs(*(draw.on(x) for x in columns), block_tokens, *ours)
    for actual, expected in zip(ours, wanted, strict=True):
        assert actual.tolist() == expected.tolist()
    places = torch.randperm(table.numel(), generator=draw.generator)[: draw.between(1, table.numel())].int()
    values, target = torch.randint(0, 99, places.shape, generator=draw.generator).int(), draw.on(table)
    triton_inputs.set_entries(target, draw.on(places), draw.on(values))
    table.view(-1)[places.long()] = values
    assert torch.equal(target.cpu(), table)


def sampling(draw: Draw) -> None:
    """Greedy rows and drawn ones, each with settings of its own, one of them bad now and then."""
    rows, vocab = draw.between(1, 6), draw.one_of(1, 17, 300, 1000, 5000)
    logits = draw.normal(rows, vocab, scale=draw.one_of(0.3, 2.0, 5.0))
    if draw.one_of(False, False, True):
        logits[draw.between(0, rows - 1), draw.between(0, vocab - 1)] = draw.one_of(math.nan, math.inf, -math.inf)

    def column(*values: float) -> Tensor:
        return torch.tensor([draw.one_of(*values) for _ in range(rows)], dtype=torch.float32)

    temperature, top_p, min_p = column(0.0, 0.7, 1.0, 1.4), column(1.0, 1.0, 0.95, 0.5, 0.0), column(0.0, 0.0, 0.05)
    top_k = column(0, 0, 1, 5, 40).to(torch.int32)
    keys = [torch.randint(0, 2**32, (rows,), generator=draw.generator) for _ in range(2)]
    ids, bad = draw.like(torch.empty(rows, dtype=torch.int32)), draw.like(torch.empty(rows, dtype=torch.int8))
    settings = (temperature, top_p, top_k, min_p, *keys)
    triton_sampling.sample(draw.on(logits), *(draw.on(x) for x in settings), ids, bad)
    greedy, wanted_bad = reference.greedy(logits)
    drawn, _ = reference.sample(logits, temperature.clamp(min=1e-9), *settings[1:])
    wanted = torch.where(temperature > 0, drawn, greedy)
    assert bad.cpu().bool().tolist() == wanted_bad.tolist()
    fine = ~wanted_bad
    assert ids.cpu()[fine].tolist() == wanted[fine].tolist()
    assert ((ids >= 0) & (ids < vocab)).cpu()[fine].all()


def penalties(draw: Draw) -> None:
    rows, vocab, length = draw.between(1, 4), draw.one_of(5, 300, 2000), draw.between(1, 60)
    logits = torch.randn(rows, vocab, generator=draw.generator) * 4
    logits[0, 0] = math.inf
    tokens = torch.randint(0, vocab, (rows, length), generator=draw.generator).int()
    lengths = torch.tensor([draw.between(1, length) for _ in range(rows)], dtype=torch.int32)
    num_prompt = torch.tensor([draw.between(0, int(n)) for n in lengths], dtype=torch.int32)
    presence, frequency = torch.randn(rows, generator=draw.generator), torch.randn(rows, generator=draw.generator)
    repetition = torch.rand(rows, generator=draw.generator) + 0.5
    ours = draw.on(logits)
    triton_sampling.penalise(ours, *(draw.on(x) for x in (tokens, lengths, num_prompt, presence, frequency, repetition)))
    for row in range(rows):
        own = tokens[row, : int(lengths[row])]
        numbers = (float(x[row]) for x in (presence, frequency, repetition))
        reference.penalise(logits[row], own, int(num_prompt[row]), *numbers)
    torch.testing.assert_close(ours.cpu(), logits, rtol=1e-6, atol=1e-6)


def logprobs(draw: Draw) -> None:
    rows, vocab = draw.between(1, 5), draw.one_of(1, 9, 300, 5000)
    logits = draw.normal(rows, vocab, scale=3.0)
    logits[rows - 1] = -1.5  # all equal: the lower id first
    num_top = min(vocab, draw.one_of(0, 1, 5, 20))
    asked = torch.randperm(rows, generator=draw.generator)[: draw.between(1, rows)].int()
    chosen = torch.randint(0, vocab, (len(asked),), generator=draw.generator).int()
    wanted = reference.top_logprobs(logits[asked.long()], chosen.long(), num_top)
    picked, top = draw.like(wanted[0]), draw.like(wanted[2])
    top_ids = draw.like(wanted[1].int())
    triton_sampling.top_logprobs(draw.on(logits), draw.on(asked), draw.on(chosen), picked, top_ids, top)
    torch.testing.assert_close(picked.cpu(), wanted[0], rtol=2e-5, atol=2e-5)
    assert top_ids.tolist() == wanted[1].tolist()
    torch.testing.assert_close(top.cpu(), wanted[2], rtol=2e-5, atol=2e-5)


def packed_weights(draw: Draw) -> None:
    """Bits alone count, so every one of them is drawn; some of the tensors look trained."""
    frame_values = draw.one_of(64, 1000, 1024, 2048, 5000)
    num_values = draw.one_of(1, 63, 64, frame_values, frame_values + 1, draw.between(1, 4 * frame_values))
    values = torch.randint(-(1 << 15), 1 << 15, (num_values,), generator=draw.generator).to(torch.int16)
    if draw.one_of(True, False):
        values = (torch.randn(num_values, generator=draw.generator) * 0.02).to(torch.bfloat16).view(torch.int16)
    frames = [codec.encode(part.numpy().view(np.uint16)) for part in values.split(frame_values)]
    begins = torch.tensor([0] + [len(frame) for frame in frames[:-1]]).cumsum(0)
    data = torch.frombuffer(bytearray(b"".join(frames)), dtype=torch.uint8)
    out = draw.like(values)
    refused = draw.on(torch.zeros(1, dtype=torch.int32))
    triton_unpack.unpack(draw.on(data), draw.on(begins), frame_values, out, refused)
    assert refused.item() == 0
    wanted = np.empty(num_values, np.uint16)
    for frame, part in zip(frames, np.split(wanted, range(frame_values, num_values, frame_values)), strict=True):
        codec.decode(np.frombuffer(bytearray(frame), np.uint8), part)
    assert np.array_equal(out.cpu().numpy().view(np.uint16), wanted)
    assert torch.equal(out.cpu(), values)
    spoilt = draw.between(0, len(frames) - 1)
    held = min(frame_values, num_values - spoilt * frame_values)
    count = int(begins[spoilt]) + layout.offsets_at(held) + 4 * draw.between(0, layout.num_groups(held) - 1)
    data[count : count + 4] = torch.from_numpy(np.array([draw.one_of(1 << 20, -(1 << 30), -1)], np.int32).view(np.uint8))
    triton_unpack.unpack(draw.on(data), draw.on(begins), frame_values, out, refused, 7)
    assert refused.item() == 7 + spoilt  # and nothing outside was read


def checksums(draw: Draw) -> None:
    num_words = draw.one_of(1, 2047, 2048, 70000, draw.between(1, 200000))
    words = torch.randint(-(2**63), 2**63 - 1, (num_words,), generator=draw.generator)
    partial = triton_checksum.new_partial_sums(draw.device)
    triton_checksum.partial_sums(draw.on(words), partial)
    sums = partial.cpu().numpy().view(np.uint64).sum(axis=0, dtype=np.uint64)
    assert checksum.joined(sums) == checksum.of(words.numpy().view(np.uint8))


CASES: dict[str, Callable[[Draw], None]] = {
    case.__name__: case
    for case in (
        norms,
        gates,
        few_rows_linear,
        gathers,
        rope,
        inputs,
        work_lists,
        decode_attention,
        extend_attention,
        sampling,
        penalties,
        logprobs,
        packed_weights,
        checksums,
        fp8_rounding,
    )
} | {f"{case.__name__}_fp8": partial(case, fp8=True) for case in (rope, decode_attention, extend_attention)}
