"""Cases for the kernels that write KV: norms, rotary embedding, rounding to fp8."""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.cuda.kernels import triton_fp8, triton_rope
from engine.ops import reference, reference_inputs
from engine.ops.ops import Rotary
from loader.shapes.model_shape import TemperatureShape
from tests.engine.kernels.draw import Draw, close
from tests.engine.kernels.paged_kv import Paged, paged


def rope(draw: Draw, fp8: bool = False) -> None:
    rows = draw.between(1, 3)
    case = paged(draw, [draw.between(rows, 30)], [40], fp8)
    pairs = draw.one_of(case.head_dim // 2, case.head_dim // 2, case.head_dim // 4, 3)
    rotary = Rotary(1.0 / 10000 ** (torch.arange(pairs).float() / pairs), draw.one_of(1.0, 1.2))
    positions = torch.randint(0, draw.one_of(30, 30000), (rows,), generator=draw.generator)
    turns = torch.empty(rows, 2 * pairs)
    reference_inputs.rotary_turns(positions.int().numpy(), rotary.inv_freq.numpy(), rotary.scale, turns.numpy())
    on_device = draw.like(turns)
    if draw.one_of(False, True):
        rotary = replace(rotary, temperature=TemperatureShape(0.1, draw.one_of(3, 8192)))
        turns *= reference.temperature_of(positions, rotary.temperature).unsqueeze(1)
    triton_rope.cos_sin(draw.on(positions), replace(rotary, inv_freq=draw.on(rotary.inv_freq)), on_device)
    torch.testing.assert_close(on_device.cpu(), turns, rtol=1e-5, atol=1e-5)
    slots = torch.randperm(case.kv.shape[0] * case.kv.shape[4], generator=draw.generator)[:rows]
    slots[draw.between(0, rows - 1)] = -1
    qkv = draw.normal(rows, (case.heads + 2 * case.kv_heads) * case.head_dim)
    query_norm, key_norm = (draw.normal(case.head_dim), draw.normal(case.head_dim)) if draw.one_of(False, True) else (None, None)
    value_norm = draw.normal(case.head_dim) if query_norm is not None and draw.one_of(False, False, True) else None
    around_one, interleaved = draw.one_of(False, True), draw.one_of(False, False, True)
    num_turned = draw.one_of(None, case.heads, 0)
    ours, arena, layer = draw.on(qkv), draw.on(case.arena), (case.layer, case.heads)
    weights = tuple(None if x is None else draw.on(x) for x in (query_norm, key_norm))
    last = draw.on(slots), interleaved, num_turned, None if value_norm is None else draw.on(value_norm)
    triton_rope.rope_and_store(ours, draw.on(turns), *weights, around_one, 1e-6, *case.view(arena), *layer, *last)
    how = (slots, case.scales, interleaved, num_turned, value_norm)
    alone = qkv[:, : case.heads * case.head_dim].clone()
    turned_alone = draw.on(alone.clone())
    triton_rope.rope(turned_alone, draw.on(turns), weights[0], around_one, 1e-6, case.heads, draw.on(slots), interleaved)
    reference.rope(alone, turns, query_norm, around_one, 1e-6, case.heads, interleaved)
    close(turned_alone, alone, draw.dtype)
    reference.rope_and_store(qkv, turns, query_norm, key_norm, around_one, 1e-6, case.kv, *layer, *how)
    queries = case.heads * case.head_dim
    close(ours[:, :queries], qkv[:, :queries], draw.dtype)
    kv, scales = case.view(arena.cpu())
    if scales is not None:
        stored_alike(case, kv, scales, value_norm is None)
        return
    assert torch.equal(kv.isnan(), case.kv.isnan())
    close(kv.nan_to_num(0.0), case.kv.nan_to_num(0.0), draw.dtype)


def stored_alike(case: Paged, kv: Tensor, scales: Tensor, values_are_plain: bool) -> None:
    """Asserts that fp8 KV equals the reference implementation's. Values without norms are stored as they are, so their codes are
    the same. Others, and keys, are computed first, and a difference in the last digit may round to the next code."""
    assert case.scales is not None
    if values_are_plain:
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
    exponent = triton_fp8.shared_scale(tl.max(triton_fp8.size_bits(wide), axis=1))
    code = triton_fp8.e4m3_of(wide * triton_fp8.scale_of(254 - exponent)[:, None])
    tl.store(codes + at, code)
    tl.store(exponents + tl.arange(0, N), exponent.to(tl.uint8))
    tl.store(again + at, triton_fp8.widened(code, tl.float32) * triton_fp8.scale_of(exponent)[:, None])


def fp8_rounding(draw: Draw) -> None:
    """Rounding to fp8 is exact for every code, every tie between two codes, and numbers of any size, in heads where one number
    decides the scale."""
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
