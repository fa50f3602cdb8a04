"""What every kernel must compute, in plain torch. The engine runs these where no kernel serves the device or the dtype; tests hold
the kernels to them.

Shapes: T tokens, W width, H query heads, G KV heads, D head size, N query tokens, R rows, B blocks a row.
KV: [num_blocks, layers, 2, G, block_tokens, D], keys at index 0 and values at 1 of the third axis. With scales [num_blocks, layers,
2, G, block_tokens] it is fp8, as quantize_fp8 makes it.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

MIN_FP8_SCALE = 127 - 24  # 2**-24: float16 has it; of what is smaller than 448 times that, the smallest numbers are rounded more


def int8_linear(x: Tensor, values: Tensor, scales: Tensor, bias: Tensor | None, held_bytes: int) -> Tensor:
    """x [T, K] @ (values [N, K] int8 * scales [N] float32) transposed. Values become x's dtype (exactly) in parts of held_bytes."""
    num_outputs, num_inputs = values.shape
    out = x.new_empty(len(x), num_outputs)
    at_once = max(1, held_bytes // (num_inputs * x.element_size()))
    held = x.new_empty(min(at_once, num_outputs), num_inputs)
    for first in range(0, num_outputs, at_once):
        some = slice(first, min(first + at_once, num_outputs))
        part = held[: some.stop - first].copy_(values[some])
        torch.mul(torch.nn.functional.linear(x, part), scales[some], out=out[:, some])
    return out if bias is None else out.add_(bias)


def rms_norm(x: Tensor, weight: Tensor, eps: float, around_one: bool = False) -> Tensor:
    """[T, W]; mean of squares in float32, rounded to x's dtype before the weight. around_one (Gemma): the factor is 1 + weight, and
    the product is rounded once."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if around_one:
        return (wide * (1.0 + weight.float())).to(x.dtype)
    return weight * wide.to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, around_one: bool = False) -> Tensor:
    """residual += x in place; returns its norm."""
    residual += x
    return rms_norm(residual, weight, eps, around_one)


def rotate(x: Tensor, cos_sin: Tensor) -> Tensor:
    """x [T, heads, D], cos_sin [T, 2 P] float32 (cosines, then sines): rotary embedding of halves of the first 2 P dimensions,
    in float32."""
    cosine, sine = cos_sin.unsqueeze(1).chunk(2, dim=-1)
    turning = cos_sin.shape[1]
    left, right = x[..., :turning].float().chunk(2, dim=-1)
    turned = torch.cat((left * cosine - right * sine, right * cosine + left * sine), dim=-1).to(x.dtype)
    return torch.cat((turned, x[..., turning:]), dim=-1)


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
) -> None:
    """qkv [T, (H + 2 G) D]: normalises (if norms are given) and rotates queries in place, and stores keys and values of the tokens
    at slots [T] (block * block_tokens + place; below 0: not stored)."""
    kv_heads, block_tokens, head_dim = kv.shape[3:]
    heads_of = qkv.view(qkv.shape[0], heads + 2 * kv_heads, head_dim)
    query, key = heads_of[:, :heads], heads_of[:, heads : heads + kv_heads]
    if query_norm is not None and key_norm is not None:
        query.copy_(rms_norm(query, query_norm, eps, around_one))
        key.copy_(rms_norm(key, key_norm, eps, around_one))
    query.copy_(rotate(query, cos_sin))
    key.copy_(rotate(key, cos_sin))
    stored = slots >= 0
    blocks, places = slots[stored] // block_tokens, slots[stored] % block_tokens
    for which, of_tokens in enumerate((key[stored], heads_of[stored, heads + kv_heads :])):
        if scales is None:
            kv[blocks, layer, which, :, places] = of_tokens
        else:
            kv[blocks, layer, which, :, places], scales[blocks, layer, which, :, places] = quantize_fp8(of_tokens)


def quantize_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [..., D] -> codes of float8_e4m3fn [..., D] and of their scales [...], both uint8; x is about 2 ** (scale - 127) * value.

    A scale is the power of two (E8M0 of the OCP's microscaling formats) that brings the largest of the D numbers to between 224 and
    448, which is e4m3's largest; so nothing is clamped, and but for the rounding nothing is lost. NaN and infinities become NaN."""
    wide = x.float()
    largest = wide.abs().amax(-1).view(torch.int32)
    scales = (((largest + 0x1FFFFF) >> 23) - 8).clamp(min=MIN_FP8_SCALE)  # the exponent, and one more above 1.75 times its power
    inverse = ((254 - scales) << 23).view(torch.float32)
    return (wide * inverse.unsqueeze(-1)).to(torch.float8_e4m3fn).view(torch.uint8), scales.to(torch.uint8)


def widen_fp8(codes: Tensor, scales: Tensor) -> Tensor:
    """What quantize_fp8 made, as float32 (without error)."""
    return codes.view(torch.float8_e4m3fn).float() * (scales.int() << 23).view(torch.float32).unsqueeze(-1)


def gather_context(
    kv: Tensor, layer: int, blocks: Tensor, first: int, context: int, scales: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Keys and values [G, context - first, D] of positions first to below context of one row, fp8 ones as float32; blocks [B]: its
    block table, of which only the entries of these positions are read."""
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
    """softcap * tanh(scores / softcap), in place; 0: as they are."""
    return scores.div_(softcap).tanh_().mul_(softcap) if softcap > 0 else scores


def paged_attention(
    qkv: Tensor,
    kv: Tensor,
    layer: int,
    heads: int,
    block_table: Tensor,
    tokens: Tensor,
    rows: Tensor,
    contexts: Tensor,
    window: int,
    scale: float,
    softcap: float,
    out: Tensor,
    sinks: Tensor | None = None,
    scales: Tensor | None = None,
) -> None:
    """Query tokens [N] of qkv [T, (H + 2 G) D] attend to the first contexts[n] positions of row rows[n], of these to the last
    `window` (0: all); out [T, H D]. Softmax in float32. sinks [H]: of each head one more score, whose value is 0."""
    kv_heads, _, head_dim = kv.shape[3:]
    for token, row, context in zip(tokens.tolist(), rows.tolist(), contexts.tolist(), strict=True):
        first = max(0, context - window) if window else 0
        key, value = gather_context(kv, layer, block_table[row], first, context, scales)
        query = qkv[token, : heads * head_dim].view(kv_heads, heads // kv_heads, head_dim).float() * scale
        scores = capped(query @ key.float().transpose(1, 2), softcap)
        if sinks is not None:
            scores = torch.cat((scores, sinks.view(kv_heads, -1, 1)), dim=-1)
        weights = torch.softmax(scores, dim=-1)[..., : key.shape[1]]
        out[token] = (weights @ value.float()).reshape(-1).to(out.dtype)


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
    """(input_ids, positions, kv_slots) [T] of tokens in rows token_rows [T], whose first ones [R] are at positions `firsts` and at
    `starts` in T. Ids below 0 are last_ids [S + 1] of the row's slot; block_table [S + 1, B]; slot S is padding, stored nowhere."""
    rows = token_rows.long()
    slot = slots[rows].long()
    positions = firsts[rows] + torch.arange(len(rows)) - starts[rows]
    cells = block_table[slot, positions // block_tokens].long() * block_tokens + positions % block_tokens
    kv_slots = torch.where(slot < len(last_ids) - 1, cells, -1)
    return torch.where(host_ids < 0, last_ids[slot], host_ids), positions, kv_slots


def split_contexts(
    contexts: Tensor, window: int, target: int, split_tokens: int, num_items: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Cuts the last `window` (0: all) of each row's contexts [R] into pieces of about 1 / target of them all, a multiple of
    split_tokens: rows, begins, ends [num_items] (0 where unused), and the first piece of each row [R + 1]."""
    begin = (contexts - window).clamp(min=0) if window else torch.zeros_like(contexts)
    length = contexts - begin
    piece = max(1, -(-int(length.sum()) // (target * split_tokens))) * split_tokens
    pieces = (length + piece - 1) // piece
    firsts = torch.cat((torch.zeros(1, dtype=torch.int64), pieces.cumsum(0)))
    rows = torch.repeat_interleave(torch.arange(len(contexts)), pieces)
    begins = begin[rows] + (torch.arange(len(rows)) - firsts[rows]) * piece
    ends = torch.minimum(begins + piece, contexts[rows])
    missing = (0, num_items - len(rows))
    return functional.pad(rows, missing), functional.pad(begins, missing), functional.pad(ends, missing), firsts


def causal_attention(query: Tensor, key: Tensor, value: Tensor, scale: float, softcap: float, mask: Tensor | None) -> Tensor:
    """query [H, N, D] against key and value [G, C, D] -> [H, N, D]; mask [N, C] bool, or None for a square causal one
    (without softcap)."""
    if softcap > 0:
        assert mask is not None
        return _capped_attention(query, key, value, scale, softcap, mask)
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
    window: int,
    scale: float,
    softcap: float,
    out: Tensor,
    tile_tokens: int,
    scales: Tensor | None = None,
) -> None:
    """query [H, N, D] are the last N of the row's `context` positions; block_table: the row's; out [N, H, D]. The keys and values
    that they see are gathered once. tile_tokens: queries that attend at a time where that needs a mask."""
    num_new = query.shape[1]
    before = context - num_new
    first = max(0, before - window + 1) if window else 0  # what the first query sees first
    key, value = (x.to(query.dtype) for x in gather_context(kv, layer, block_table, first, context, scales))
    if before == 0 and not 0 < window < context and softcap == 0:
        out.copy_(causal_attention(query, key, value, scale, 0.0, None).transpose(0, 1))
        return
    for tile in range(0, num_new, tile_tokens):  # the mask is what takes memory
        end = min(tile + tile_tokens, num_new)
        low, high = max(0, before + tile - window + 1) if window else 0, before + end
        mask = torch.ones(end - tile, high - low, dtype=torch.bool).tril_(before + tile - low)
        if window:
            mask.triu_(before + tile - low - window + 1)
        keys = slice(low - first, high - first)
        part = causal_attention(query[:, tile:end], key[:, keys], value[:, keys], scale, softcap, mask)
        out[tile:end] = part.transpose(0, 1)


def _capped_attention(query: Tensor, key: Tensor, value: Tensor, scale: float, softcap: float, mask: Tensor) -> Tensor:
    """As causal_attention, one KV head at a time: scores are held in full."""
    group = query.shape[0] // key.shape[0]
    out = torch.empty_like(query)
    hidden = ~mask
    for head in range(key.shape[0]):
        own = slice(head * group, (head + 1) * group)
        scores = capped((query[own] @ key[head].T).float().mul_(scale), softcap).masked_fill_(hidden, -torch.inf)
        out[own] = torch.softmax(scores, dim=-1).to(value.dtype) @ value[head]
    return out


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """[T, 2 W] -> [T, W]: silu(gate) * up."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate) * up


def gelu_and_mul(gate_up: Tensor) -> Tensor:
    """[T, 2 W] -> [T, W]: gelu(gate) * up, gelu in its form with tanh."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.gelu(gate, approximate="tanh") * up


def gather_rows(table: Tensor, ids: Tensor, scale: float) -> Tensor:
    """table [V, W], ids [T] -> [T, W], times scale in float32."""
    rows = functional.embedding(ids, table)
    return rows if scale == 1.0 else (rows.float() * scale).to(table.dtype)


def greedy(logits: Tensor) -> tuple[Tensor, Tensor]:
    """logits [N, V] -> (first index of the largest, whether the row holds NaN or an infinity)."""
    return logits.argmax(-1), ~torch.isfinite(logits).all(-1)


def hash32(index: Tensor, key0: Tensor, key1: Tensor) -> Tensor:
    """32 well mixed bits of (index, key0, key1) in int64: the counter-based noise of `sample`."""
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
    """logits [N, V], the rest [N] (keys int64 below 2**32) -> (ids, bad). Draws from softmax(logits / temperature) cut to the
    top_k largest and to min_p of the likeliest, then to the smallest set that holds top_p (0, 0 and 1: off; ties stay in). An
    exponential race decides: token i's time is an exponential draw keyed by (key0, key1, i) over its weight, the first wins. Rows
    of temperature 0 take their likeliest."""
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
    # one half: a draw of 0 would win whatever its weight
    uniform = (hash32(torch.arange(vocab), key0.unsqueeze(1), key1.unsqueeze(1)).double() + 0.5) / 2**32
    times = -torch.log1p(-uniform) / weights
    return torch.where(draws, times.masked_fill(weights < cutoff, torch.inf).argmin(-1), likeliest), bad


def top_logprobs(logits: Tensor, chosen: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """logits [N, V], chosen [N] -> (log-softmax at chosen [N], ids and log-softmax [N, num_top] of the likeliest, likeliest first,
    the lower id first among equals)."""
    logprobs = torch.log_softmax(logits.double(), dim=-1).float()
    ordered = torch.sort(logits, dim=-1, descending=True, stable=True).indices[:, :num_top]
    return logprobs.gather(1, chosen.unsqueeze(1)).squeeze(1), ordered, logprobs.gather(1, ordered)


def penalise(row: Tensor, tokens: Tensor, num_prompt: int, presence: float, frequency: float, repetition: float) -> None:
    """row [V] float32 in place; tokens: prompt, then output. Logits of all tokens seen are divided by `repetition` where positive
    and multiplied where not; `frequency` times their count in the output, and `presence` if there is one, are taken off. What is
    not finite stays."""
    seen = tokens.unique().long()
    counts = torch.bincount(tokens[num_prompt:].long(), minlength=len(row))[seen]
    old = row[seen].double()
    new = torch.where(old > 0, old / repetition, old * repetition) - frequency * counts - presence * (counts > 0)
    row[seen] = torch.where(torch.isfinite(old), new.clamp(-1e30, 1e30), old).float()
