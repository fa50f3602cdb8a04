"""The reference implementation of every kernel, in plain torch. The engine runs it where no kernel serves the device or the dtype,
and tests compare the kernels with it.

Shapes: T tokens, W width, H query heads, G KV heads, D head size, N query tokens (of matrix multiplications: outputs, of logits:
rows), R rows, B blocks of a row, K inputs of a matrix, G scales of an output, C experts of a token, E experts, V vocabulary; of
latent attention and the delta rule as in ops.py.

KV cache: [num_blocks, layers, 2, G, block_tokens, D], with keys at index 0 and values at index 1 of the third axis. If it comes
with scales [num_blocks, layers, 2, G, block_tokens], it is fp8 as quantize_fp8 makes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from engine.ops.ops import (
    ClampedSwiglu,
    DeltaRule,
    ExpertMatrices,
    ExpertMatrix,
    Fp8Matrix,
    Int4Matrix,
    Int8Matrix,
    Mxfp4Matrix,
    Nvfp4Matrix,
    PackedMatrix,
    SigmoidRouting,
)
from engine.ops.rows_apart import rows_apart
from loader.formats.int8 import WIDENED_BYTES
from loader.formats.packed_rows import PANEL_BODY_BYTES, PANEL_CODES, PANEL_ROWS, num_blocks, unpack_rows
from loader.shapes.model_shape import TemperatureShape

# The smallest scale is 2**-24, which float16 can hold. If all numbers are below 448 times that, small ones are rounded more.
MIN_FP8_SCALE = 127 - 24
_WIDENING_BYTES = 24  # bytes that mxfp4_values allocates for each number
UNIT_NORM_EPS = 1e-6  # eps of the norm of a delta rule's queries and keys
_DELTA_TOKENS = 64  # tokens that the delta rule computes at a time


def int8_linear(x: Tensor, values: Tensor, scales: Tensor, bias: Tensor | None, held_bytes: int) -> Tensor:
    """Returns x [T, K] times the transpose of the weight matrix (values [N, K] int8 * scales [N] float32), plus bias [N] (None: no
    bias).

    The values are converted to x's dtype, which is exact, in parts of at most held_bytes bytes (but at least one row)."""
    out, apart = x.new_empty(len(x), len(values)), rows_apart(x)
    for some, part in _parts(x, values.shape, held_bytes):
        torch.mul(functional.linear(apart, part.copy_(values[some])), scales[some], out=out[:, some])
    return out if bias is None else out.add_(bias)


def _parts(like: Tensor, shape: torch.Size, held_bytes: int) -> Iterator[tuple[slice, Tensor]]:
    """Yields slices of the outputs of a matrix [N, K], each with memory for the slice's weights in the dtype of `like`. All slices
    share that memory, which has at most held_bytes bytes, but room for at least one output."""
    num_outputs, num_inputs = shape
    at_once = max(1, held_bytes // (num_inputs * like.element_size()))
    held = like.new_empty(min(at_once, num_outputs), num_inputs)
    for first in range(0, num_outputs, at_once):
        some = slice(first, min(first + at_once, num_outputs))
        yield some, held[: some.stop - first]


def fp8_rows(values: Tensor, scales: Tensor, group_inputs: int, out: Tensor) -> None:
    """Converts an FP8 matrix: writes its weights to out [N, K]. values [N, K] uint8: codes of float8_e4m3fn. scales [N, G] float32:
    each for group_inputs inputs of an output. A weight, code times scale, is rounded once to float32, and once more if out's dtype
    is shorter."""
    factors = scales if scales.shape[1] == 1 else scales.repeat_interleave(group_inputs, dim=1)[:, : values.shape[1]]
    out.copy_(values.view(torch.float8_e4m3fn).float().mul_(factors))


def fp8_linear(x: Tensor, values: Tensor, scales: Tensor, group_inputs: int, bias: Tensor | None, held_bytes: int) -> Tensor:
    """Returns x [T, K] times the transpose of an FP8 matrix (see fp8_rows), plus bias [N] (None: no bias). The weights are
    converted to x's dtype in parts of at most held_bytes bytes (but at least one row)."""

    def write(some: slice, part: Tensor) -> None:
        fp8_rows(values[some], scales[some], group_inputs, part)

    return _written_linear(x, values.shape, write, bias, held_bytes)


def _written_linear(
    x: Tensor, shape: torch.Size, write: Callable[[slice, Tensor], None], bias: Tensor | None, held_bytes: int
) -> Tensor:
    """Returns x [T, K] times the transpose of a matrix of this shape [N, K], plus bias [N]. write(some, part): writes the rows
    `some` (a slice) of the matrix to the tensor `part`. held_bytes: the most bytes of the matrix that are in memory at a time, but
    at least one row."""
    out, apart = x.new_empty(len(x), shape[0]), rows_apart(x)
    for some, part in _parts(x, shape, held_bytes):
        write(some, part)
        out[:, some] = functional.linear(apart, part, None if bias is None else bias[some])
    return out


def int4_rows(packed: Tensor, scales: Tensor, zeros: Tensor | None, group_inputs: int, out: Tensor) -> None:
    """Converts an INT4 matrix: writes its weights, (number - zero point) * scale, to out [N, K]. packed [N, K / 2] uint8: the
    numbers, two a byte. scales, zeros [N, G]: each for group_inputs inputs of an output; zeros None: all are 8. The weights are
    exact in float32, and rounded once if out's dtype is shorter."""
    numbers = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2).float()

    def of_inputs(groups: Tensor) -> Tensor:
        return groups.float() if groups.shape[1] == 1 else groups.float().repeat_interleave(group_inputs, dim=1)

    numbers.sub_(8 if zeros is None else of_inputs(zeros))
    out.copy_(numbers.mul_(of_inputs(scales)))


def int4_linear(
    x: Tensor,
    packed: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    group_inputs: int,
    bias: Tensor | None,
    held_bytes: int,
) -> Tensor:
    """Returns x [T, K] times the transpose of an INT4 matrix (see int4_rows), plus bias [N] (None: no bias). held_bytes: the most
    bytes of converted weights in memory at a time, but at least one row."""

    def write(some: slice, part: Tensor) -> None:
        int4_rows(packed[some], scales[some], None if zeros is None else zeros[some], group_inputs, part)

    return _written_linear(x, torch.Size((len(packed), x.shape[1])), write, bias, held_bytes)


def packed_rows(packed: PackedMatrix, some: slice, out: Tensor) -> None:
    """Writes the weights of the outputs `some` (a slice) of a packed matrix to out [outputs, K] (bfloat16, or a dtype that holds
    them exactly)."""
    first, panels = some.start // PANEL_ROWS, slice(some.start // PANEL_ROWS, -(-some.stop // PANEL_ROWS))
    rows = np.empty((some.stop - first * PANEL_ROWS, packed.num_inputs), np.uint16)
    body, codes, bases, starts, escapes = panels_of(packed, panels)
    unpack_rows(body, codes, bases, starts, escapes, rows)
    out.copy_(torch.from_numpy(rows[some.start - first * PANEL_ROWS :]).view(torch.bfloat16))


def panels_of(packed: PackedMatrix, panels: slice | None = None) -> tuple[Any, Any, Any, Any, Any]:
    """Returns the arrays of some panels (groups of outputs that are packed together) of a packed matrix (None: of all), as
    loader.formats.packed_rows.unpack_rows takes them."""
    panels = slice(0, packed.num_panels) if panels is None else panels
    blocks = num_blocks(packed.num_inputs)
    sizes = (blocks * PANEL_BODY_BYTES, blocks * PANEL_CODES, PANEL_ROWS, 1)
    parts = (packed.body, packed.codes, packed.bases, packed.starts)
    body, codes, bases, starts = (
        part.numpy()[panels.start * each : panels.stop * each] for part, each in zip(parts, sizes, strict=True)
    )
    return body, codes, bases, starts, packed.escapes.numpy()


def packed_linear(x: Tensor, packed: PackedMatrix, bias: Tensor | None, held_bytes: int) -> Tensor:
    """Returns x [T, K] times the transpose of a packed matrix, plus bias [N] (None: no bias). The weights are unpacked to x's dtype
    in parts of at most held_bytes bytes (but at least one row)."""
    return _written_linear(x, packed.shape, lambda some, part: packed_rows(packed, some, part), bias, held_bytes)


def add_adapters(
    x: Tensor, out: Tensor, parts: Sequence[int], numbers: Tensor, places: Tensor, ranks: Tensor, memory: Tensor
) -> None:
    """Adds what LoRA adapters contribute to the multiplication of x [T, K] by a matrix to its result out [T, N], in place (see
    Ops.add_adapters). parts: the number of outputs of each of the P matrices of the checkpoint that are multiplied as one.

    numbers [T]: each token's adapter, -1: none. places, ranks [S]: each adapter's place in memory (below 0: it does not change the
    multiplication) and LoRA rank. memory: flat. At an adapter's place lie down [P, rank, K], and then for each part up [rank,
    parts[p]]."""
    for number in numbers.unique().tolist():
        if number < 0 or (at := int(places[number])) < 0:
            continue
        rows, rank, num_inputs = (numbers == number).nonzero().squeeze(1), int(ranks[number]), x.shape[1]
        own = x[rows].float()
        up_at, first = at + len(parts) * rank * num_inputs, 0
        for part, num_outputs in enumerate(parts):
            down = memory[at + part * rank * num_inputs :][: rank * num_inputs].view(rank, num_inputs)
            up = memory[up_at : up_at + rank * num_outputs].view(rank, num_outputs)
            some = slice(first, first + num_outputs)
            out[rows, some] = (out[rows, some].float() + own @ down.float().t() @ up.float()).to(out.dtype)
            up_at, first = up_at + rank * num_outputs, first + num_outputs


def rms_norm(x: Tensor, weight: Tensor, eps: float, around_one: bool = False) -> Tensor:
    """Returns the RMS norm of x [T, W]: each row divided by the root of its mean square plus eps, times weight [W]. The division is
    in float32 and is rounded to x's dtype before the weight is applied. around_one (Gemma): the factor is 1 + weight instead, and
    only the product is rounded."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if around_one:
        return (wide * (1.0 + weight.float())).to(x.dtype)
    return weight * wide.to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, around_one: bool = False, scale: float = 1.0) -> Tensor:
    """Adds x [T, W] times scale to residual [T, W] in place and returns the RMS norm of the sum, as rms_norm does."""
    residual.add_(x, alpha=scale)
    return rms_norm(residual, weight, eps, around_one)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Returns x [T, W] minus its rows' means, divided by the root of their variances, times weight [W], plus bias [W]. It is
    computed in float32 and rounded once."""
    wide_bias = None if bias is None else bias.float()
    return functional.layer_norm(x.float(), weight.shape, weight.float(), wide_bias, eps).to(x.dtype)


def add_layer_norm(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float, scale: float = 1.0) -> Tensor:
    """Adds x [T, W] times scale to residual [T, W] in place and returns the LayerNorm of the sum, as layer_norm does."""
    residual.add_(x, alpha=scale)
    return layer_norm(residual, weight, bias, eps)


def rotate(x: Tensor, cos_sin: Tensor, interleaved: bool = False) -> Tensor:
    """Applies rotary embedding to x [T, heads, D]: pairs dimension i with dimension P + i of the first 2 P dimensions (interleaved:
    dimension 2 i with the next) and rotates each pair in float32. The other dimensions are unchanged. cos_sin: [T, 2 P] float32, P
    cosines, then P sines."""
    cosine, sine = cos_sin.unsqueeze(1).chunk(2, dim=-1)
    turning = cos_sin.shape[1]
    wide = x[..., :turning].float()
    left, right = (wide[..., ::2], wide[..., 1::2]) if interleaved else wide.chunk(2, dim=-1)
    pairs = (left * cosine - right * sine, right * cosine + left * sine)
    turned = (torch.stack(pairs, dim=-1).flatten(-2) if interleaved else torch.cat(pairs, dim=-1)).to(x.dtype)
    return torch.cat((turned, x[..., turning:]), dim=-1)


def temperature_of(positions: Tensor, temperature: TemperatureShape) -> Tensor:
    """Returns the factors [T] float32 by which queries at these positions [T] are scaled: 1 + scale * ln(1 + floor((position + 1) /
    tokens)), with scale and tokens of `temperature`."""
    return torch.log1p(torch.floor((positions.float() + 1.0) / temperature.tokens)) * temperature.scale + 1.0


def rope_and_store(
    qkv: Tensor,
    cos_sin: Tensor,
    query_norm: Tensor | None,
    key_norm: Tensor | None,
    around_one: bool,
    eps: float,
    kv: Tensor,
    layer: int,
    heads: int,
    slots: Tensor,
    scales: Tensor | None = None,
    interleaved: bool = False,
    num_turned: int | None = None,
    value_norm: Tensor | None = None,
) -> None:
    """Normalises (if norms are given) and rotates the queries and keys of qkv [T, (H + 2 G) D] in place, normalises the values if
    they have a norm, and stores keys and values in the KV cache.

    query_norm, key_norm, value_norm [D], around_one, eps: as in rms_norm. cos_sin, interleaved: as in rotate. heads: H. num_turned:
    how many heads are rotated, counted from the first query head on; None: all queries and keys.
    kv [num_blocks, layers, 2, G, block_tokens, D]: the KV cache, of which index `layer` is written. scales: the scales of the cache
    if it is fp8.
    slots [T]: each token's place in the cache, block * block_tokens + place in the block; below 0: the token is not stored."""
    kv_heads, block_tokens, head_dim = kv.shape[3:]
    heads_of = qkv.view(qkv.shape[0], heads + 2 * kv_heads, head_dim)
    query, key = heads_of[:, :heads], heads_of[:, heads : heads + kv_heads]
    if query_norm is not None and key_norm is not None:
        query.copy_(rms_norm(query, query_norm, eps, around_one))
        key.copy_(rms_norm(key, key_norm, eps, around_one))
    if value_norm is not None:
        value = heads_of[:, heads + kv_heads :]
        value.copy_(rms_norm(value, value_norm, eps))
    turned = heads_of[:, : heads + kv_heads if num_turned is None else num_turned]
    turned.copy_(rotate(turned, cos_sin, interleaved))
    stored = slots >= 0
    blocks, places = slots[stored] // block_tokens, slots[stored] % block_tokens
    for which, of_tokens in enumerate((key[stored], heads_of[stored, heads + kv_heads :])):
        if scales is None:
            kv[blocks, layer, which, :, places] = of_tokens
        else:
            kv[blocks, layer, which, :, places], scales[blocks, layer, which, :, places] = quantize_fp8(of_tokens)


def rope(
    queries: Tensor, cos_sin: Tensor, norm: Tensor | None, around_one: bool, eps: float, heads: int, interleaved: bool = False
) -> None:
    """Normalises (if norm [D] is given) and rotates queries [T, H D] in place. around_one, eps: as in rms_norm. heads: H. cos_sin,
    interleaved: as in rotate."""
    by_head = queries.view(len(queries), heads, -1)
    if norm is not None:
        by_head.copy_(rms_norm(by_head, norm, eps, around_one))
    by_head.copy_(rotate(by_head, cos_sin, interleaved))


def add_and_scale(update: Tensor, residual: Tensor, factor: Tensor) -> None:
    """Adds update to residual in place, and multiplies the sum by factor [1]."""
    residual.add_(update).mul_(factor)


def column_squares(x: Tensor, widths: tuple[int, ...], out: Tensor) -> None:
    """Writes the sum of squares of each row of x over each of C adjacent ranges of columns to out [T, C] float32. widths: the
    numbers of columns of the ranges, of which the first begins at column 0."""
    for place, columns in enumerate(x.split([*widths, x.shape[1] - sum(widths)], 1)[:-1]):
        torch.linalg.vector_norm(columns, dim=1, dtype=torch.float32, out=out[:, place])
    out.square_()


def norm_columns_by(x: Tensor, weights: tuple[Tensor, ...], squares: Tensor, parts: int, eps: float) -> None:
    """Normalises C adjacent ranges of x's columns in place: divides them by the root of their mean squares plus eps, and multiplies
    them by a weight [W] for each range, rounded as rms_norm does. squares [T, C]: sums of squares over `parts` times as many
    columns as x has in the range."""
    first = 0
    for weight, sums in zip(weights, squares.unbind(1), strict=True):
        columns = x[:, first : first + len(weight)]
        factors = torch.rsqrt(sums / (parts * len(weight)) + eps)
        columns.copy_(weight * (columns.float() * factors.unsqueeze(1)).to(x.dtype))
        first += len(weight)


def columns_twice(x: Tensor, first: int, out: Tensor) -> None:
    """Writes x [T, N], with its columns from `first` on repeated at the end, to out [T, 2 N - first]."""
    torch.cat((x, x[:, first:]), 1, out=out)


def quantize_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantizes x [..., D] to float8_e4m3fn codes [..., D] with scales [...], both uint8. x is about 2 ** (scale - 127) times the
    code's value.

    A scale is the power of two (E8M0 of the OCP's microscaling formats) that brings the largest of the D numbers to between 224 and
    448, the largest number of e4m3. So nothing is clamped, and rounding is the only error. NaN and infinities become NaN."""
    wide = x.float()
    largest = wide.abs().amax(-1).view(torch.int32)
    scales = (((largest + 0x1FFFFF) >> 23) - 8).clamp(min=MIN_FP8_SCALE)  # exponent, plus 1 above 1.75 times its power of two
    inverse = ((254 - scales) << 23).view(torch.float32)
    return (wide * inverse.unsqueeze(-1)).to(torch.float8_e4m3fn).view(torch.uint8), scales.to(torch.uint8)


def widen_fp8(codes: Tensor, scales: Tensor) -> Tensor:
    """Returns the numbers [..., D] that quantize_fp8 encoded, as float32 (the conversion is exact)."""
    return codes.view(torch.float8_e4m3fn).float() * (scales.int() << 23).view(torch.float32).unsqueeze(-1)


def gather_context(
    kv: Tensor, layer: int, blocks: Tensor, first: int, context: int, scales: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Returns the keys and the values [G, context - first, D] of one row's positions from `first` to below `context`, from the KV
    cache kv [num_blocks, layers, 2, G, block_tokens, D]. scales: the scales of the cache if it is fp8, whose numbers are then
    returned as float32; None: the cache is not fp8. blocks: [B], the row's block table, of which only the entries of these
    positions are read."""
    kv_heads, block_tokens, head_dim = kv.shape[3:]
    first_block, end_block = first // block_tokens, -(-context // block_tokens)
    pages = kv[blocks[first_block:end_block], layer]
    if scales is not None:
        pages = widen_fp8(pages, scales[blocks[first_block:end_block], layer])
    pages = pages.permute(1, 2, 0, 3, 4)
    pages = pages.reshape(2, kv_heads, (end_block - first_block) * block_tokens, head_dim)
    begin = first_block * block_tokens
    return pages[0, :, first - begin : context - begin], pages[1, :, first - begin : context - begin]


def capped(scores: Tensor, softcap: float) -> Tensor:
    """Returns softcap * tanh(scores / softcap), computed in place. With softcap 0 the scores are returned unchanged."""
    return scores.div_(softcap).tanh_().mul_(softcap) if softcap > 0 else scores


def first_seen(context: int, reach: int) -> int:
    """Returns the first position that the last of `context` positions attends to. reach R > 0: it attends to the last R positions,
    its own included; R < 0: to its own chunk of -R positions; 0: to all."""
    if reach > 0:
        return max(0, context - reach)
    return max(0, context - 1) // -reach * -reach if reach < 0 else 0


def paged_attention(
    qkv: Tensor,
    kv: Tensor,
    layer: int,
    heads: int,
    block_table: Tensor,
    tokens: Tensor,
    rows: Tensor,
    contexts: Tensor,
    reach: int,
    scale: float,
    softcap: float,
    out: Tensor,
    sinks: Tensor | None = None,
    scales: Tensor | None = None,
) -> None:
    """Computes attention token by token, and writes it to out [T, H D]: query token tokens[n] of qkv [T, (H + 2 G) D] attends to
    the first contexts[n] positions of row rows[n], without those before the position that first_seen returns.

    kv, scales: the KV cache, as in gather_context. heads: H. block_table [R, B]. reach: how far back a token attends, as in
    first_seen.
    scale: factor of the scores. softcap: as in capped. sinks: [H], one more score for each head, whose value is 0; None: there are
    none. The softmax is computed in float32."""
    kv_heads, _, head_dim = kv.shape[3:]
    for token, row, context in zip(tokens.tolist(), rows.tolist(), contexts.tolist(), strict=True):
        first = first_seen(context, reach)
        key, value = gather_context(kv, layer, block_table[row], first, context, scales)
        query = qkv[token, : heads * head_dim].view(kv_heads, heads // kv_heads, head_dim).float() * scale
        scores = capped(query @ key.float().transpose(1, 2), softcap)
        if sinks is not None:
            scores = torch.cat((scores, sinks.view(kv_heads, -1, 1)), dim=-1)
        weights = torch.softmax(scores, dim=-1)[..., : key.shape[1]]
        out[token] = (weights @ value.float()).reshape(-1).to(out.dtype)


def rope_and_store_latents(
    queries: Tensor,
    down: Tensor,
    cos_sin: Tensor,
    norm: Tensor,
    eps: float,
    kv: Tensor,
    layer: int,
    heads: int,
    slots: Tensor,
    scales: Tensor | None = None,
    interleaved: bool = False,
) -> None:
    """Rotates queries [T, H (K + R)] in place and stores latents (see Ops.rope_and_store_latents).

    cos_sin: as in rotate, for 2 P = R. heads: H. slots [T]: each token's place in the cache; below 0: the token is not stored.
    kv [num_blocks, layers, 1, 1, block_tokens, L + R]: the KV cache, of which index `layer` is written. scales: the scales of the
    cache if it is fp8, of kv's shape without the last axis."""
    block_tokens, token_values = kv.shape[4:]
    turning, rank = cos_sin.shape[1], len(norm)
    turned = queries.view(len(queries), heads, -1)[..., -turning:]
    turned.copy_(rotate(turned, cos_sin, interleaved))
    own = down[:, -token_values:]
    keys = rotate(own[:, None, rank:], cos_sin, interleaved).squeeze(1)
    latents = torch.cat((rms_norm(own[:, :rank], norm, eps), keys), dim=-1)
    stored = slots >= 0
    blocks, places = slots[stored] // block_tokens, slots[stored] % block_tokens
    if scales is None:
        kv[blocks, layer, 0, 0, places] = latents[stored]
    else:
        kv[blocks, layer, 0, 0, places], scales[blocks, layer, 0, 0, places] = quantize_fp8(latents[stored])


def gather_latents(kv: Tensor, layer: int, blocks: Tensor, context: int, scales: Tensor | None = None) -> Tensor:
    """Returns the latents of a row's first `context` positions, [context, L + R], from the KV cache kv [num_blocks, layers, 1, 1,
    block_tokens, L + R]. blocks: the row's block table. scales: the scales of the cache if it is fp8; None: it is not."""
    used = blocks[: -(-context // kv.shape[4])]
    pages = kv[used, layer, 0, 0]
    if scales is not None:
        pages = widen_fp8(pages, scales[used, layer, 0, 0])
    return pages.flatten(0, 1)[:context]


def latent_attention(
    queries: Tensor,
    up: Tensor,
    kv: Tensor,
    layer: int,
    block_table: Tensor,
    tokens: Tensor,
    rows: Tensor,
    contexts: Tensor,
    scale: float,
    out: Tensor,
    scales: Tensor | None = None,
) -> None:
    """Computes latent attention token by token in the expanded form (keys and values are made of the latents), and writes it to out
    [T, H V]: query tokens[n] of queries [T, H (K + R)] attends to the first contexts[n] positions of row rows[n]. Keys, values and
    the softmax are computed in float32.

    up [H, K + V, L]: LatentHeads.up of each head. kv, layer, scales: the KV cache, as in gather_latents. block_table [R, B]. scale:
    factor of the scores."""
    heads, _, rank = up.shape
    value_dim = out.shape[1] // heads
    plain = up.shape[1] - value_dim
    for token, row, context in zip(tokens.tolist(), rows.tolist(), contexts.tolist(), strict=True):
        held = gather_latents(kv, layer, block_table[row], context, scales).float()
        made = torch.einsum("cl,hkl->hck", held[:, :rank], up.float())
        turned = held[:, rank:].expand(heads, -1, -1)
        query = queries[token].view(heads, 1, -1).float() * scale
        weights = torch.softmax(query @ torch.cat((made[..., :plain], turned), dim=-1).transpose(1, 2), dim=-1)
        out[token] = (weights @ made[..., plain:]).reshape(-1).to(out.dtype)


def prepare_inputs(
    token_rows: Tensor,
    host_ids: Tensor,
    slots: Tensor,
    firsts: Tensor,
    starts: Tensor,
    last_ids: Tensor,
    block_table: Tensor,
    block_tokens: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns (input_ids, positions, kv_slots), each [T], of the tokens of a step.

    token_rows [T]: the row of each token. host_ids [T]: the token ids that the host knows; one below 0 stands for last_ids [S + 1]
    of the row's slot. slots [R]: the row's slot. firsts, starts [R]: the position and the index in T of each row's first token.
    block_table: [S + 1, B]. Slot S is padding: its tokens are at position 0, and get kv_slot -1 (stored nowhere)."""
    rows = token_rows.long()
    slot = slots[rows].long()
    positions = torch.where(slot < len(last_ids) - 1, firsts[rows] + torch.arange(len(rows)) - starts[rows], 0)
    cells = block_table[slot, positions // block_tokens].long() * block_tokens + positions % block_tokens
    kv_slots = torch.where(slot < len(last_ids) - 1, cells, -1)
    return torch.where(host_ids < 0, last_ids[slot], host_ids), positions, kv_slots


def split_contexts(
    contexts: Tensor, reach: int, target: int, split_tokens: int, num_items: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Divides the work of attention by split-K: cuts the positions that the last position of each row's context attends to into
    parts, about `target` in all. The parts have the same size, a multiple of split_tokens, except that a row's last part may be
    shorter. contexts [R]: the number of positions of each row. reach: how far back a position attends, as in first_seen.

    Returns rows, begins and ends [num_items] of the parts (0 where unused), and the index of each row's first part [R + 1]."""
    begin = torch.tensor([first_seen(context, reach) for context in contexts.tolist()], dtype=contexts.dtype)
    length = contexts - begin
    piece = max(1, -(-int(length.sum()) // (target * split_tokens))) * split_tokens
    pieces = (length + piece - 1) // piece
    firsts = torch.cat((torch.zeros(1, dtype=torch.int64), pieces.cumsum(0)))
    rows = torch.repeat_interleave(torch.arange(len(contexts)), pieces)
    begins = begin[rows] + (torch.arange(len(rows)) - firsts[rows]) * piece
    ends = torch.minimum(begins + piece, contexts[rows])
    missing = (0, num_items - len(rows))
    return functional.pad(rows, missing), functional.pad(begins, missing), functional.pad(ends, missing), firsts


def causal_attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float, softcap: float, mask: Tensor | None, sinks: Tensor | None = None
) -> Tensor:
    """Returns the attention [H, N, D] of query [H, N, D] to C keys and values: key and value [G, C, D].

    mask: [N, C] bool, True where a query attends; None for causal attention of as many queries as keys (only without softcap and
    sinks).
    scale: factor of the scores. softcap: scores become softcap * tanh(score / softcap); 0: they are unchanged. sinks: [H], one more
    score for each head, whose value is 0; None: there are none."""
    if softcap > 0 or sinks is not None:
        assert mask is not None
        return _attention_by_head(query, key, value, scale, softcap, mask, sinks)
    return functional.scaled_dot_product_attention(
        query.unsqueeze(0),
        key.unsqueeze(0),
        value.unsqueeze(0),
        attn_mask=mask,
        is_causal=mask is None and query.shape[1] > 1,
        scale=scale,
        enable_gqa=True,
    ).squeeze(0)


def long_row_attention(
    query: Tensor,
    kv: Tensor,
    layer: int,
    block_table: Tensor,
    context: int,
    reach: int,
    scale: float,
    softcap: float,
    out: Tensor,
    tile_tokens: int,
    scales: Tensor | None = None,
    sinks: Tensor | None = None,
) -> None:
    """Computes attention for the queries [H, N, D] of the last N of one row's `context` positions, and writes it to out [N, H, D].
    The keys and values to which the queries attend are gathered once.

    block_table [B]: the row's own. tile_tokens: number of queries computed at a time where a mask is needed. The other parameters
    are those of paged_attention."""
    num_new = query.shape[1]
    before = context - num_new
    first = first_seen(before + 1, reach)  # the first position that the first query attends to
    key, value = (x.to(query.dtype) for x in gather_context(kv, layer, block_table, first, context, scales))
    if before == 0 and first_seen(context, reach) == 0 and softcap == 0 and sinks is None:
        out.copy_(causal_attention(query, key, value, scale, 0.0, None).transpose(0, 1))
        return
    for tile in range(0, num_new, tile_tokens):  # in tiles, because the mask takes much memory
        end = min(tile + tile_tokens, num_new)
        low, high = first_seen(before + tile + 1, reach), before + end
        mask = torch.ones(end - tile, high - low, dtype=torch.bool).tril_(before + tile - low)
        if reach > 0:
            mask.triu_(before + tile - low - reach + 1)
        elif reach < 0:
            lowest = torch.arange(before + tile, before + end) // -reach * -reach
            mask &= torch.arange(low, high) >= lowest.unsqueeze(1)
        keys = slice(low - first, high - first)
        part = causal_attention(query[:, tile:end], key[:, keys], value[:, keys], scale, softcap, mask, sinks)
        out[tile:end] = part.transpose(0, 1)


def _attention_by_head(
    query: Tensor, key: Tensor, value: Tensor, scale: float, softcap: float, mask: Tensor, sinks: Tensor | None
) -> Tensor:
    """Computes causal_attention for a combination of a mask with a softcap or sinks. Computes one KV head at a time, because all
    scores of a head are held in memory."""
    group = query.shape[0] // key.shape[0]
    out = torch.empty_like(query)
    hidden = ~mask
    for head in range(key.shape[0]):
        own = slice(head * group, (head + 1) * group)
        scores = capped((query[own] @ key[head].T).float().mul_(scale), softcap).masked_fill_(hidden, -torch.inf)
        if sinks is not None:
            scores = torch.cat((scores, sinks[own].view(-1, 1, 1).expand(-1, scores.shape[1], 1)), dim=-1)
        out[own] = torch.softmax(scores, dim=-1)[..., : key.shape[1]].to(value.dtype) @ value[head]
    return out


def without_gates(x: Tensor, heads: int, head_dim: int, out: Tensor) -> None:
    """Writes the columns of x [T, (2 H + 2 G) D] that are not gates to out [T, (H + 2 G) D]. In x each query head's D columns are
    followed by D columns of gates. heads: H. head_dim: D."""
    width = heads * head_dim
    by_head = x[:, : 2 * width].unflatten(1, (heads, 2, head_dim))
    out[:, :width].unflatten(1, (heads, head_dim)).copy_(by_head[:, :, 0])
    out[:, width:].copy_(x[:, 2 * width :])


def gate_heads(attended: Tensor, x: Tensor, head_dim: int) -> None:
    """Multiplies attended [T, H D] in place by the sigmoids of the gates of x [T, (2 H + 2 G) D], which follow each query head's D
    columns."""
    gates = x[:, : 2 * attended.shape[1]].unflatten(1, (-1, 2, head_dim))[:, :, 1]
    attended.unflatten(1, (-1, head_dim)).mul_(torch.sigmoid(gates))


def gated_delta(
    x: Tensor,
    gates: Tensor,
    rule: DeltaRule,
    states: Tensor,
    layer: int,
    block_tokens: int,
    block_table: Tensor,
    starts: Tensor,
    num_new: Tensor,
    contexts: Tensor,
    out: Tensor,
) -> None:
    """Computes a gated delta rule (https://arxiv.org/abs/2412.06464; see Ops.gated_delta), and writes its outputs to out [T, V D].
    Computed in float32, _DELTA_TOKENS at a time; a head's output is rounded to x's dtype before it is normalised, and again before
    the gate.

    states [num_blocks, layers, numbers of a state] float32.
    block_table [R, B]: for each block of block_tokens tokens of a row, the block that holds the state after its last computed
    token; -1 where there is none.
    starts, num_new, contexts [R]: each row's first token in the step, its number of tokens in the step, and its number of positions
    after it."""
    out.zero_()
    for row in torch.nonzero(num_new).flatten().tolist():
        start, num, context = int(starts[row]), int(num_new[row]), int(contexts[row])
        first, blocks = context - num, block_table[row, : -(-context // block_tokens)].tolist()
        state = states[blocks[(first - 1) // block_tokens], layer].clone() if first else torch.zeros_like(states[0, layer])
        matrices, before = state[: rule.matrix_values], state[rule.matrix_values :]
        own = slice(start, start + num)
        columns = torch.cat((before.view(-1, rule.conv_width), _delta_columns(x[own].float(), rule)))
        seen = _delta_convolve(columns, rule)
        query, key, value = _delta_heads(functional.silu(seen).to(x.dtype).float(), rule)
        update, step = _delta_gates(gates[own].float(), rule)
        decay = -rule.decay.exp() * functional.softplus(step + rule.step_bias)
        matrix = matrices.view(rule.num_value_heads, rule.key_dim, rule.value_dim)
        made, at = torch.empty(num, rule.num_value_heads, rule.value_dim), 0
        while at < num:
            end = _delta_end(blocks, block_tokens, first, at, num)
            part = slice(at, end)
            made[part] = _delta_chunk(query[part], key[part], value[part], torch.sigmoid(update[part]), decay[part], matrix)
            at, block = end, blocks[(first + end - 1) // block_tokens]
            if at == num or ((first + at) % block_tokens == 0 and block >= 0):
                states[block, layer, : rule.matrix_values] = matrices
                states[block, layer, rule.matrix_values :] = columns[at : at + rule.convolution.shape[1] - 1].reshape(-1)
        normed = rms_norm(made.to(x.dtype), rule.norm, rule.eps)
        output_gates = _by_value_head(x[own], rule.columns.gate, rule.columns.value_stride, rule)
        out[own] = (normed.float() * functional.silu(output_gates.float())).to(out.dtype).flatten(1)


def _delta_end(blocks: list[int], block_tokens: int, first: int, at: int, num: int) -> int:
    """Returns where the part of a row's tokens that begins with token `at` ends: the index, among the row's `num` new tokens, of
    the first token after it. All tokens of a part are computed at once. A part has at most _DELTA_TOKENS tokens, and ends earlier
    where a state is to be written or the row ends. blocks: the block for the state after each block_tokens tokens of the sequence;
    -1: none is written. first: the position in the sequence of the row's first new token."""
    end = min(num, at + _DELTA_TOKENS)
    for block in range((first + at) // block_tokens, (first + end - 1) // block_tokens):
        if blocks[block] >= 0:
            return (block + 1) * block_tokens - first
    return end


def _delta_chunk(query: Tensor, key: Tensor, value: Tensor, update: Tensor, decay: Tensor, matrix: Tensor) -> Tensor:
    """Computes n tokens of the gated delta rule at once: returns their outputs [n, V, D], and advances the state matrix [V, K, D]
    in place to the state after them.

    query, key [n, V, K]; value [n, V, D]. update [n, V]: the portion of its value that a token writes. decay [n, V]: logarithms of
    the factors by which the state decays.

    A token writes update * (value - the value that its key reads from the state), which depends on what earlier tokens write: a
    triangular system of equations."""
    query, key, value = (one.transpose(0, 1) for one in (query, key, value))
    update, decay = update.t().unsqueeze(2), decay.t().cumsum(1).unsqueeze(2)
    since = (decay - decay.transpose(1, 2)).tril().exp().tril()
    system = (update * (key @ key.transpose(1, 2)) * since).tril(-1)
    written = torch.linalg.solve_triangular(
        system, update * (value - decay.exp() * (key @ matrix)), upper=False, unitriangular=True
    )
    made = decay.exp() * (query @ matrix) + (query @ key.transpose(1, 2) * since) @ written
    last = decay[:, -1:]
    matrix.mul_(last.exp()).add_((key * (last - decay).exp()).transpose(1, 2) @ written)
    return made.transpose(0, 1)


def _delta_columns(x: Tensor, rule: DeltaRule) -> Tensor:
    """Returns the queries, keys and values of a gated delta rule, picked from the columns of the projection's output x, as [T, C]:
    all queries first, then keys, then values, each head by head."""
    at = rule.columns
    keys = (_by_key_head(x, first, rule).flatten(1) for first in (at.query, at.key))
    return torch.cat((*keys, _by_value_head(x, at.value, at.value_stride, rule).flatten(1)), dim=1)


def _delta_convolve(columns: Tensor, rule: DeltaRule) -> Tensor:
    """Returns the causal convolution [T, C] of columns [N - 1 + T, C], which begin with those of the N - 1 tokens before the
    step."""
    weights = rule.convolution.float()
    num = len(columns) - weights.shape[1] + 1
    # not torch's conv1d, which oneDNN computes wrongly for 8 modulo 16 columns in SVE vectors of 512 bits (docs/aarch64.md)
    made = columns[:num] * weights[:, 0]
    for n in range(1, weights.shape[1]):
        made.addcmul_(columns[n : n + num], weights[:, n])
    return made


def _delta_heads(columns: Tensor, rule: DeltaRule) -> tuple[Tensor, Tensor, Tensor]:
    """Divides convolved columns [T, C] into heads. Returns queries and keys [T, V, K], repeated for each value head and scaled to
    length 1 (queries then by key_dim ** -0.5), and values [T, V, D]."""
    widths = (rule.num_key_heads * rule.key_dim,) * 2 + (rule.num_value_heads * rule.value_dim,)
    query, key, value = columns.split(widths, dim=1)
    served = rule.num_value_heads // rule.num_key_heads
    query, key = (one.unflatten(1, (rule.num_key_heads, rule.key_dim)) for one in (query, key))
    query, key = (one * torch.rsqrt(one.pow(2).sum(-1, keepdim=True) + UNIT_NORM_EPS) for one in (query, key))
    query, key = ((one.repeat_interleave(served, dim=1)) for one in (query * rule.key_dim**-0.5, key))
    return query, key, value.unflatten(1, (rule.num_value_heads, rule.value_dim))


def _delta_gates(gates: Tensor, rule: DeltaRule) -> tuple[Tensor, Tensor]:
    """Returns each value head's update [T, V] and step [T, V] from gates [T, 2 V], the output of the projection of the gates
    (DeltaColumns)."""
    served = rule.num_value_heads // rule.num_key_heads
    strides = (gates.stride(0), rule.columns.head_stride, 1)
    sizes = (len(gates), rule.num_key_heads, served)
    both = (gates.as_strided(sizes, strides, gates.storage_offset() + at) for at in (rule.columns.update, rule.columns.step))
    update, step = (one.reshape(len(gates), -1) for one in both)
    return update, step


def _by_key_head(x: Tensor, first: int, rule: DeltaRule) -> Tensor:
    """Returns the columns of x that belong to key heads, as a view [T, K, key_dim]: each of the K heads has key_dim columns, and
    those of the first head begin at column `first`."""
    sizes = (len(x), rule.num_key_heads, rule.key_dim)
    return x.as_strided(sizes, (x.stride(0), rule.columns.key_stride, 1), x.storage_offset() + first)


def _by_value_head(x: Tensor, first: int, stride: int, rule: DeltaRule) -> Tensor:
    """Returns the columns of x that belong to value heads, as [T, V, D]: each of the V heads has D columns, and those of the first
    head begin at column `first`. stride: number of columns from the first value head of one key head to that of the next key
    head."""
    served = rule.num_value_heads // rule.num_key_heads
    sizes, strides = (len(x), rule.num_key_heads, served, rule.value_dim), (x.stride(0), stride, rule.value_dim, 1)
    return x.as_strided(sizes, strides, x.storage_offset() + first).flatten(1, 2)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """Returns silu(gate) * up [T, W], of gate and up side by side in gate_up [T, 2 W]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate) * up


def gelu(x: Tensor) -> Tensor:
    """Returns the tanh approximation of gelu(x), of x's shape."""
    return functional.gelu(x, approximate="tanh")


def gelu_and_mul(gate_up: Tensor) -> Tensor:
    """Returns gelu(gate) * up [T, W], of gate and up side by side in gate_up [T, 2 W]. gelu is the tanh approximation."""
    gate, up = gate_up.chunk(2, dim=-1)
    return gelu(gate) * up


def clamped_swiglu(gate_up: Tensor, limit: float, alpha: float) -> Tensor:
    """Returns (up + 1) * gate * sigmoid(alpha * gate) [T, W], of gate and up that alternate in gate_up [T, 2 W]: columns of even
    index are gates. Gates are first clamped to at most limit, ups to between -limit and limit. Computed in float32."""
    gate, up = gate_up[:, ::2].float().clamp(max=limit), gate_up[:, 1::2].float().clamp(-limit, limit)
    return ((up + 1.0) * (gate * torch.sigmoid(alpha * gate))).to(gate_up.dtype)


def mxfp4_values(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Converts MXFP4 numbers: returns [..., K] in this dtype from blocks [..., K / 32, 16] and scales [..., K / 32] (Mxfp4Matrix).
    The numbers are exact in float32 and bfloat16."""
    wide = torch.ldexp(e2m1_numbers(blocks), scales.int().unsqueeze(-1) - 127)
    return wide.flatten(-2).to(dtype)


def e2m1_numbers(packed: Tensor) -> Tensor:
    """Returns the 4-bit numbers in the bytes packed [..., K / 2], as float32 [..., K]. A byte has two, the first in the low four
    bits; each is a sign bit, two exponent bits and a mantissa bit."""
    magnitudes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    return torch.cat((magnitudes, -magnitudes))[torch.stack((packed & 15, packed >> 4), dim=-1).long()].flatten(-2)


def nvfp4_rows(packed: Tensor, scales: Tensor, factors: Tensor, out: Tensor) -> None:
    """Converts an NVFP4 matrix (Nvfp4Matrix): writes its weights to out [N, K] from packed [N, K / 2], scales [N, K / 16] and
    factors [N]. The scale of 16 inputs is a code's value times the output's factor, rounded to float32. A weight is a number times
    that scale, rounded to float32, and once more if out's dtype is shorter."""
    of_groups = scales.view(torch.float8_e4m3fn).float().mul_(factors.unsqueeze(1))
    numbers = e2m1_numbers(packed).unflatten(1, (of_groups.shape[1], -1))
    out.copy_(numbers.mul_(of_groups.unsqueeze(2)).flatten(1))


def nvfp4_linear(x: Tensor, packed: Tensor, scales: Tensor, factors: Tensor, bias: Tensor | None, held_bytes: int) -> Tensor:
    """Returns x [T, K] times the transpose of an NVFP4 matrix (see nvfp4_rows), plus bias [N] (None: no bias). held_bytes: the most
    bytes of converted weights in memory at a time, but at least one row."""

    def write(some: slice, part: Tensor) -> None:
        nvfp4_rows(packed[some], scales[some], factors[some], part)

    return _written_linear(x, torch.Size((len(packed), x.shape[1])), write, bias, held_bytes)


def mxfp4_linear(x: Tensor, blocks: Tensor, scales: Tensor, bias: Tensor | None, held_bytes: int) -> Tensor:
    """Returns x [T, K] times the transposed matrix of MXFP4 blocks [N, K / 32, 16] and scales [N, K / 32], plus bias [N] (None: no
    bias). The matrix is converted in parts, one at a time, of at least one row; with all intermediate values a part takes at most
    held_bytes bytes."""
    num_outputs, out = len(blocks), x.new_empty(len(x), len(blocks))
    at_once = max(1, held_bytes // (x.shape[1] * _WIDENING_BYTES))
    for first in range(0, num_outputs, at_once):
        some = slice(first, first + at_once)
        part = mxfp4_values(blocks[some], scales[some], x.dtype)
        out[:, some] = functional.linear(x, part, None if bias is None else bias[some])
    return out


def _expert_linear(x: Tensor, matrices: ExpertMatrix, bias: Tensor | None, number: int) -> Tensor:
    """Returns x [T, K] times the transposed matrix of the expert with this number, plus its bias (None: no bias). matrices [E, N,
    K], bias [E, N]: those of all experts."""
    own_bias = None if bias is None else bias[number]
    if isinstance(matrices, Mxfp4Matrix):
        return mxfp4_linear(x, matrices.blocks[number], matrices.scales[number], own_bias, WIDENED_BYTES)
    if isinstance(matrices, Fp8Matrix):
        own = matrices[number]
        return fp8_linear(x, own.values, own.scales, own.group_inputs, own_bias, WIDENED_BYTES)
    if isinstance(matrices, Int8Matrix):
        each = matrices[number]
        return int8_linear(x, each.values, each.scales, own_bias, WIDENED_BYTES)
    if isinstance(matrices, Nvfp4Matrix):
        part = matrices[number]
        return nvfp4_linear(x, part.packed, part.scales, part.factors, own_bias, WIDENED_BYTES)
    if isinstance(matrices, Int4Matrix):
        one = matrices[number]
        return int4_linear(x, one.packed, one.scales, one.zeros, one.group_inputs, own_bias, WIDENED_BYTES)
    return functional.linear(rows_apart(x), matrices[number], own_bias)


def gated(gate_up: Tensor, clamped: ClampedSwiglu | None, gelu: bool = False) -> Tensor:
    """Returns the activation [T, I] of a layer's experts for gate_up [T, 2 I]: clamped_swiglu if `clamped` is given, gelu(gate) *
    up if `gelu`, else silu(gate) * up."""
    if gelu:
        return gelu_and_mul(gate_up)
    return silu_and_mul(gate_up) if clamped is None else clamped_swiglu(gate_up, clamped.limit, clamped.alpha)


def route(
    scores: Tensor, num_chosen: int, normalised: bool, by_sigmoid: bool = False, factors: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Returns the experts [T, C] int64 that each token passes through, the one with the highest of its scores [T, E] first, and
    their weights [T, C] float32: the softmax of the scores, or (normalised) that divided by its sum over the C experts, or
    (by_sigmoid) the sigmoids of their scores. Of equal scores the expert with the lower number is chosen. factors [E]: factors of
    the weights."""
    if factors is not None:
        chosen, weights = route(scores, num_chosen, normalised, by_sigmoid)
        return chosen, weights * factors.float()[chosen]
    wide = scores.float()
    ordered, chosen = torch.sort(wide, dim=-1, descending=True, stable=True)
    if by_sigmoid:
        return chosen[:, :num_chosen], torch.sigmoid(ordered[:, :num_chosen])
    if normalised:
        return chosen[:, :num_chosen], torch.softmax(ordered[:, :num_chosen], dim=-1)
    return chosen[:, :num_chosen], torch.softmax(wide, dim=-1).gather(1, chosen[:, :num_chosen])


def linear_float32(x: Tensor, weight: Tensor) -> Tensor:
    """Returns x [T, K] @ weight [N, K] float32 transposed, computed in float32."""
    return functional.linear(x.float(), weight)


def route_by_sigmoid(logits: Tensor, num_chosen: int, normalised: bool, rule: SigmoidRouting) -> tuple[Tensor, Tensor]:
    """Returns experts [T, C] int64 and weights [T, C] float32, as `route` does, by the rule of DeepSeek-V3
    (https://arxiv.org/abs/2412.19437). The scores are the sigmoids of logits [T, E] float32. Experts are chosen by their scores
    plus the correction: first the groups whose two best experts have the highest sums, then the best experts of these. The weights
    are the scores alone, divided (normalised) by their sum over the C experts, times the factor. By DeepSeek-V2's rule
    (by_softmax; https://arxiv.org/abs/2405.04434) the scores are the softmax of the logits, and groups are chosen by their best
    expert."""
    scores = torch.softmax(logits, dim=-1) if rule.by_softmax else torch.sigmoid(logits)
    merits = scores + rule.correction
    grouped = merits.view(len(merits), rule.num_groups, -1)
    of_groups = grouped.topk(1 if rule.by_softmax else 2, dim=-1).values.sum(dim=-1)
    others = torch.sort(of_groups, dim=-1, descending=True, stable=True).indices[:, rule.num_chosen_groups :]
    is_other = torch.zeros_like(of_groups, dtype=torch.bool).scatter_(1, others, True)
    merits = grouped.masked_fill(is_other.unsqueeze(-1), float("-inf")).view(merits.shape)
    chosen = torch.sort(merits, dim=-1, descending=True, stable=True).indices[:, :num_chosen]
    weights = scores.gather(1, chosen)
    if normalised:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return chosen, weights * rule.factor


def experts(x: Tensor, scores: Tensor, matrices: ExpertMatrices, slots: Tensor, shared: Tensor | None) -> Tensor:
    """Returns the output [T, W] of a layer's experts for x [T, W] (see Ops.experts), summed over those experts whose matrices are
    given, and adds to the counts of all experts. slots [T] int64: each token's place in the KV cache; below 0 for padding. Each
    expert's output is rounded to x's dtype; the weighted sum is in float32 and rounded once."""
    is_padding = slots < 0
    num_experts = matrices.num_experts
    how = (scores[:, :num_experts], matrices.num_chosen, matrices.normalised)
    if matrices.sigmoid is None:
        chosen, weights = route(*how, matrices.weighs_inputs, matrices.factors)
    else:
        chosen, weights = route_by_sigmoid(*how, matrices.sigmoid)
    chosen = chosen.masked_fill(is_padding.unsqueeze(1), num_experts)
    if matrices.turns is not None:
        chosen = own_pairs(chosen, slots, matrices.turns, matrices.num_own)
    if (counts := matrices.counts) is not None:
        counts.add_(torch.bincount(chosen.flatten(), minlength=len(counts) + 1)[: len(counts)])
    first = 0 if matrices.turns is not None else matrices.first_own
    total = torch.zeros(x.shape, dtype=torch.float32)
    for expert in range(matrices.num_own):
        tokens, places = torch.where(chosen == first + expert)
        if len(tokens):
            own, rows = weights[tokens, places].unsqueeze(1), x[tokens]
            if matrices.weighs_inputs:
                rows, own = (rows.float() * own).to(x.dtype), torch.ones_like(own)
            gate_up = _expert_linear(rows, matrices.gate_up, matrices.gate_up_bias, expert)
            made = _expert_linear(gated(gate_up, matrices.clamped, matrices.gelu), matrices.down, matrices.down_bias, expert)
            total.index_add_(0, tokens, made.float() * own)
    if shared is not None:
        is_gated = scores.shape[1] > num_experts
        total += shared.float() * torch.sigmoid(scores[:, num_experts:].float()) if is_gated else shared.float()
    return total.masked_fill_(is_padding.unsqueeze(1), 0.0).to(x.dtype)


def own_pairs(chosen: Tensor, slots: Tensor, turns: Tensor, num_own: int) -> Tensor:
    """Returns chosen [T, C] with each expert's number replaced by its index among the num_own matrices of this rank (device), and
    by num_own for pairs of a token and an expert that other ranks compute.

    chosen: the experts' numbers; the number of experts for padding. slots [T]: each token's place in the KV cache. turns [E, 3]: as
    in ExpertMatrices."""
    holders, number, index = turns[chosen.clamp(max=len(turns) - 1)].long().unbind(-1)
    is_own = (chosen < len(turns)) & (slots.unsqueeze(1) % holders == number)
    return torch.where(is_own, index, num_own)


def gather_rows(table: Tensor, ids: Tensor, scale: float, first: int | None = None) -> Tensor:
    """Returns the rows of table [V, W] with the indices ids [T], times scale (computed in float32), as [T, W]. first: `table` has
    only some rows of the whole table, from this index on, and other rows are zeros; None: it has all rows."""
    if first is None:
        return _scaled_rows(functional.embedding(ids, table), scale)
    at = ids - first
    own = at.clamp(0, len(table) - 1)
    return _scaled_rows(functional.embedding(own, table).masked_fill_((at != own).unsqueeze(1), 0.0), scale)


def _scaled_rows(rows: Tensor, scale: float) -> Tensor:
    return rows if scale == 1.0 else (rows.float() * scale).to(rows.dtype)


def gather_packed_rows(packed: PackedMatrix, ids: Tensor, scale: float) -> Tensor:
    """Returns the rows of a packed table with the indices ids [T], as [T, K] bfloat16, multiplied with scale in float32."""
    rows = torch.empty(len(ids), packed.num_inputs, dtype=packed.dtype)
    for number, row in enumerate(ids.tolist()):
        packed_rows(packed, slice(row, row + 1), rows[number : number + 1])
    return _scaled_rows(rows, scale)


def greedy(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the id of the largest logit of each row of logits [N, V] (of equal ones the first), and whether the row holds NaN or
    an infinity."""
    return logits.argmax(-1), ~torch.isfinite(logits).all(-1)


def hash32(index: Tensor, key0: Tensor, key1: Tensor) -> Tensor:
    """Returns 32 well mixed bits of (index, key0, key1) as int64, elementwise. `sample` takes its random noise from them, so that
    it needs no random generator with a state."""
    low = 0xFFFFFFFF
    h = ((index * 0x9E3779B1) & low) ^ key0
    h = ((h ^ (h >> 16)) * 0x85EBCA6B) & low
    h = ((h ^ (h >> 13)) * 0xC2B2AE35) & low
    h = ((h ^ (h >> 16)) + key1) & low
    h = ((h ^ (h >> 15)) * 0x2C1B3C6D) & low
    h = ((h ^ (h >> 12)) * 0x297A2D39) & low
    return h ^ (h >> 15)


def sample(
    logits: Tensor, temperature: Tensor, top_p: Tensor, top_k: Tensor, min_p: Tensor, key0: Tensor, key1: Tensor
) -> tuple[Tensor, Tensor]:
    """Samples a token for each row of logits [N, V]; the other arguments are [N], keys int64 below 2**32. Returns (ids, bad), where
    bad tells whether the row holds NaN or an infinity. Rows of temperature 0 take their most likely token.

    Samples from softmax(logits / temperature) of the top_k largest tokens whose probability is at least min_p times the largest,
    and of these from the smallest set that holds top_p of their mass. 0, 0 and 1 turn top_k, min_p and top_p off; ties stay in.

    The choice is an exponential race: token i's time is an exponential random number keyed by (key0, key1, i), divided by the
    token's weight. The token with the earliest time wins."""
    likeliest, bad = greedy(logits)
    draws = temperature > 0.0
    wide = torch.nan_to_num(logits.float()).double()
    weights = torch.exp((wide - wide.amax(-1, keepdim=True)) / torch.where(draws, temperature, 1.0).unsqueeze(1))
    ordered = weights.sort(-1, descending=True).values
    vocab = logits.shape[1]
    k = torch.where(top_k > 0, top_k.clamp(max=vocab), vocab).long().unsqueeze(1)
    ordered = ordered * (ordered >= ordered.gather(1, k - 1)) * (ordered >= min_p.unsqueeze(1))
    before = ordered.cumsum(-1) - ordered
    inside = (before < top_p.unsqueeze(1) * ordered.sum(-1, keepdim=True)) & (ordered > 0)
    inside |= (top_p >= 1.0).unsqueeze(1) & (ordered > 0)
    cutoff = ordered.gather(1, inside.sum(-1, keepdim=True).clamp(min=1) - 1)
    # plus one half, because a token with time 0 would win whatever its weight
    uniform = (hash32(torch.arange(vocab), key0.unsqueeze(1), key1.unsqueeze(1)).double() + 0.5) / 2**32
    times = -torch.log1p(-uniform) / weights
    return torch.where(draws, times.masked_fill(weights < cutoff, torch.inf).argmin(-1), likeliest), bad


def top_logprobs(logits: Tensor, chosen: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns, for logits [N, V], the log-softmax of the tokens `chosen` [N]; then the ids [N, num_top] of the most likely tokens,
    most likely first, and their log-softmax [N, num_top]. Of equal logits the lower id comes first."""
    logprobs = torch.log_softmax(logits.double(), dim=-1).float()
    ordered = torch.sort(logits, dim=-1, descending=True, stable=True).indices[:, :num_top]
    return logprobs.gather(1, chosen.unsqueeze(1)).squeeze(1), ordered, logprobs.gather(1, ordered)


def ranks(logits: Tensor, chosen: Tensor) -> Tensor:
    """Returns the rank of the token `chosen` [N] in each row of logits [N, V], [N] int32: how many logits are at least as large as
    the token's own."""
    # comparisons are stored as float32: 512 rows of 152,000 tokens then take 0.08 s, as booleans 0.2 to 2 s
    at_least = torch.empty(logits.shape, dtype=torch.float32)
    torch.ge(logits, logits.gather(1, chosen.unsqueeze(1)), out=at_least)
    return at_least.sum(1).int()


def penalise(row: Tensor, tokens: Tensor, num_prompt: int, presence: float, frequency: float, repetition: float) -> None:
    """Applies penalties to the logits row [V] float32 in place. tokens: the num_prompt tokens of the prompt, then those of the
    output.

    The logits of all these tokens are divided by `repetition` where they are positive and multiplied by it where not. Then
    `frequency` times the token's count in the output is subtracted, and `presence` if the output has the token. Logits that are not
    finite stay."""
    seen = tokens.unique().long()
    counts = torch.bincount(tokens[num_prompt:].long(), minlength=len(row))[seen]
    old = row[seen].double()
    new = torch.where(old > 0, old / repetition, old * repetition) - (
        frequency * counts.double() + presence * (counts > 0).double()
    )
    row[seen] = torch.where(torch.isfinite(old), new.clamp(-1e30, 1e30), old).float()
