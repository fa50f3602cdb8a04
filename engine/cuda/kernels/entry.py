"""The GPU kernels as engine/cuda/ops.py and model.py call them. Triton compiles them for a model's sizes and keeps them in the
node's cache folder.

Under TRITON_INTERPRET=1 the same kernels run on CPU tensors, slowly. Shapes are those of engine/ops/ops.py: T tokens, W width, R
rows, S slots, H query heads, D head size, V dimensions of a head's values (in attention to latents).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

from engine.cuda.batch import DeviceBatch, QueryTiles
from engine.cuda.kernels import (
    flash_attention,
    linear_choice,
    tiles,
    triton_adapters,
    triton_decode,
    triton_delta,
    triton_experts,
    triton_extend,
    triton_four_bits_linear,
    triton_fp8_linear,
    triton_inputs,
    triton_latent,
    triton_latent_attention,
    triton_logits,
    triton_rope,
    triton_rows,
    triton_sampling,
)
from engine.host import compiled
from engine.ops.ops import (
    AdaptedProduct,
    BatchAdapters,
    DeltaRule,
    ExpertMatrices,
    Fp8Matrix,
    Int4Matrix,
    Int8Matrix,
    LatentHeads,
    Nvfp4Matrix,
    PackedMatrix,
    Rotary,
)

tile_tokens = triton_extend.tile_tokens
rank_bound = triton_adapters.rank_bound
SMALLEST_RANK_BOUND = triton_adapters.RANK_BOUNDS[0]
MANY_ROWS = triton_decode.MANY_ROWS
joins_pieces = tiles.joins_pieces
linear = linear_choice.linear
gated_linear = linear_choice.gated_linear
gate_and_mul = linear_choice.gate_and_mul
both_kernels = linear_choice.both_kernels
measure_linear = linear_choice.measure
is_open = linear_choice.is_open
uses_ours = linear_choice.uses_ours
one_of_each_size = linear_choice.one_of_each_size
widen = triton_logits.widen
add_biases_and_count = triton_logits.add_biases_and_count
penalise_and_ban = triton_logits.penalise_and_ban
top_logprobs = triton_logits.top_logprobs
ranks = triton_logits.ranks
weights_of_products = linear_choice.weights_of_products
Product = linear_choice.Product
EDIT_WORDS, PENALTIES = triton_logits.EDIT_WORDS, triton_logits.PENALTIES
FEW_ROWS = (1, 2, 4)
KERNELS_BYTES = 64 << 20  # disk space that must be free, because Triton fails if it cannot write a file
INTERPRETED = bool(triton.knobs.runtime.interpret)


def configure(cache_dir: str) -> None:
    """Sets the folder in which Triton keeps compiled kernels: cache_dir, or a temporary folder if cache_dir cannot be written or
    has too little free space. On a GPU also loads from this folder which kernels of matrix products were measured to be faster, and
    keeps later choices there (linear_choice.keep_in)."""
    triton.knobs.cache.dir = compiled.writable(cache_dir, KERNELS_BYTES)
    if not INTERPRETED and torch.cuda.is_available():
        linear_choice.keep_in(Path(triton.knobs.cache.dir))


def byte_linear(x: Tensor, weight: Fp8Matrix | Int8Matrix, bias: Tensor | None) -> Tensor:
    """Returns x [T, K] @ weight [N, K] transposed, plus bias [N] (None: no bias), as [T, N] in x's dtype, for weights of one byte
    each. In the context linear_choice.both_kernels all kernels and tile sizes are launched, so that they are compiled."""
    scales = weight.scales.view(len(weight), -1)
    return _quantised_linear(triton_fp8_linear, x, len(weight), (weight.values, scales, weight.group_inputs, bias))


def four_bits_linear(x: Tensor, weight: Int4Matrix | Nvfp4Matrix, bias: Tensor | None) -> Tensor:
    """Returns x [T, K] @ weight [N, K] transposed, plus bias [N], as byte_linear does, for weights of four bits. The caller has put
    the columns of x into the order in which the matrix stores its inputs."""
    return _quantised_linear(triton_four_bits_linear, x, len(weight), (weight, bias))


def _quantised_linear(kernels: Any, x: Tensor, num_outputs: int, matrix: tuple[Any, ...]) -> Tensor:
    """Returns the product of x [T, K] and a transposed matrix [num_outputs, K], plus a bias, as [T, num_outputs]. kernels: a module
    with the functions few_rows_linear, for up to triton_fp8_linear.MAX_ROWS rows, and tile_linear, for more. matrix: the arguments
    that both functions take after x (weights, scales and bias)."""
    out = x.new_empty(x.shape[0], num_outputs)
    launches_all = linear_choice.launches_both()
    if x.shape[0] <= triton_fp8_linear.MAX_ROWS:
        kernels.few_rows_linear(x, *matrix, out)
        if not launches_all:
            return out
    for tile in triton_fp8_linear.TILE_ROWS if launches_all else (triton_fp8_linear.tile_rows(x.shape[0]),):
        kernels.tile_linear(x, *matrix, tile, INTERPRETED, out)
    return out


def add_adapters(x: Tensor, out: Tensor, product: AdaptedProduct, adapters: BatchAdapters, bound: int, decodes: bool) -> None:
    """Adds to out [T, N], for each token of x [T, K], the token's product with the matrices of its LoRA adapter, as
    Ops.add_adapters does. product: the matrix multiplication whose result is `out`. adapters: each token's adapter, and the tables
    of all adapters. bound: one of RANK_BOUNDS; no adapter has a larger rank. decodes: every row has one token. In the context
    linear_choice.both_kernels tiles of all sizes are launched, for small and large ranks, so that they are compiled."""
    launches_all = linear_choice.launches_both()
    tiles = triton_adapters.TILE_TOKENS if launches_all else (triton_adapters.tile_tokens(len(x), decodes),)
    bounds = triton_adapters.RANK_BOUNDS[:2] if launches_all else (bound,)
    for tile, own in itertools.product(tiles, bounds):
        triton_adapters.add_adapters(x, out, product, adapters, own, tile, INTERPRETED)


def adapter_numbers(of_slots: Tensor, slots: Tensor, token_rows: Tensor) -> Tensor:
    """Returns the number of each token's adapter, [T] int32; -1: the token has none. of_slots [S + 1]: the adapter's number of each
    slot's sequence. slots [R]: the slot of each row. token_rows [T] int32: the row of each token."""
    numbers = torch.empty_like(token_rows)
    triton_adapters.adapter_numbers(of_slots, slots, token_rows, numbers)
    return numbers


def rms_norm(x: Tensor, weight: Tensor, eps: float, around_one: bool) -> Tensor:
    out = torch.empty_like(x)
    triton_rows.rms_norm(x, None, weight, eps, around_one, out)
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, around_one: bool, scale: float = 1.0) -> Tensor:
    out = torch.empty_like(x)
    triton_rows.rms_norm(x, residual, weight, eps, around_one, out, scale)
    return out


def layer_norm(x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, scale: float = 1.0) -> Tensor:
    """Returns the LayerNorm [T, W] of each row of x [T, W]. With a residual [T, W], adds x times scale to the residual in place and
    returns the LayerNorm of that sum."""
    out = torch.empty_like(x)
    triton_rows.layer_norm(x, residual, weight, bias, eps, out, scale)
    return out


def gelu(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    triton_rows.gelu(x, out)
    return out


def experts(x: Tensor, scores: Tensor, experts: ExpertMatrices, shared: Tensor | None, batch: DeviceBatch) -> Tensor:
    """Returns the output [T, W] of a layer's experts for x [T, W], as Ops.experts does: for each token the weighted sum of its
    chosen experts' outputs. scores [T, >= E]: the router's scores of E experts. shared [T, W]: the output of the shared expert,
    which is added; None: there is none. If other ranks hold some of the experts, the output has only the part of the experts whose
    matrices are here. In the context linear_choice.both_kernels products are launched with tiles of both sizes, so that they are
    compiled."""
    num_experts, num_chosen, kv_slots = experts.num_experts, experts.num_chosen, batch.groups[0].kv_slots
    chosen, weights, firsts, pairs = triton_experts.empty_routing(len(x), num_chosen, num_experts, x.device)
    if experts.sigmoid is None:
        triton_experts.route(
            scores, kv_slots, num_experts, experts.normalised, chosen, weights, experts.weighs_inputs, experts.factors
        )
    else:
        triton_experts.route_by_sigmoid(scores, kv_slots, experts.sigmoid, experts.normalised, chosen, weights)
    own, some = range(experts.first_own, experts.first_own + experts.num_own), experts.is_part
    if experts.turns is not None:  # only the rank's own pairs are sorted then
        own, firsts = range(experts.num_own), firsts[: experts.num_own + 1]
        triton_experts.keep_own_pairs(chosen, kv_slots, experts.turns, experts.num_own)
    triton_experts.sort(chosen, firsts, pairs, counts=experts.counts)
    if experts.turns is None and some:
        firsts = firsts[own.start : own.stop + 1]
    inner, made = x.new_empty(len(pairs), experts.down.shape[2]), x.new_empty(len(pairs), x.shape[1])
    tiles = (triton_experts.tile_rows(len(pairs), num_experts),)
    for tile in triton_experts.TILE_ROWS if linear_choice.launches_both() else tiles:
        how = (firsts, pairs, num_chosen)
        last = (tile, INTERPRETED)
        factors, gate_bias = weights if experts.weighs_inputs else None, experts.gate_up_bias
        triton_experts.grouped_linear(
            x, experts.gate_up, *how, True, *last, inner, gate_bias, experts.clamped, factors, experts.gelu
        )
        triton_experts.grouped_linear(inner, experts.down, *how, False, *last, made, experts.down_bias)
    out = torch.empty_like(x)
    gates = scores if scores.shape[1] > num_experts else None
    triton_experts.combine(made, weights, kv_slots, gates, shared, out, not experts.weighs_inputs, chosen if some else None, own)
    return out


def rope_and_store(
    qkv: Tensor,
    query_norm: Tensor | None,
    key_norm: Tensor | None,
    value_norm: Tensor | None,
    around_one: bool,
    eps: float,
    layer: int,
    heads: int,
    batch: DeviceBatch,
    interleaved: bool,
    num_turned: int | None,
) -> None:
    group, place = batch.group_of(layer)
    norms, kv = (query_norm, key_norm, around_one, eps), (group.kv, group.scales)
    triton_rope.rope_and_store(
        qkv, group.turns, *norms, *kv, place, heads, group.kv_slots, interleaved, num_turned, value_norm=value_norm
    )


def rope(
    queries: Tensor,
    norm: Tensor | None,
    around_one: bool,
    eps: float,
    layer: int,
    heads: int,
    batch: DeviceBatch,
    interleaved: bool,
) -> None:
    group, _ = batch.group_of(layer)
    triton_rope.rope(queries, group.turns, norm, around_one, eps, heads, group.kv_slots, interleaved)


def attention(
    qkv: Tensor, layer: int, heads: int, scale: float, softcap: float, batch: DeviceBatch, sinks: Tensor | None = None
) -> Tensor:
    """Returns the attention [T, H D] of the step's tokens in a layer whose keys and values have been stored. Results of tokens that
    belong to no row are undefined. heads: H. scale: factor of the scores. softcap: scores become softcap * tanh(score / softcap);
    0: they stay. sinks [H]: one more score for each head, which takes weight but has no value; None: there are none."""
    group, place = batch.group_of(layer)
    out = qkv.new_empty(qkv.shape[0], heads * group.kv.shape[5])
    kv = (group.kv, group.scales)
    if batch.num_decode:
        triton_decode.decode_attention(
            qkv, *kv, place, heads, group.block_table, batch.slots, group.work, scale, softcap, sinks, INTERPRETED, out
        )
    if batch.tiles is not None:
        extend_attention(
            qkv,
            *kv,
            place,
            heads,
            group.block_table,
            batch.slots,
            batch.tiles,
            batch.contexts,
            group.reach,
            scale,
            softcap,
            sinks,
            out,
        )
    return out


def extend_attention(
    qkv: Tensor,
    kv: Tensor,
    scales: Tensor | None,
    layer: int,
    heads: int,
    block_table: Tensor,
    table_rows: Tensor,
    query_tiles: QueryTiles,
    contexts: Tensor,
    reach: int,
    scale: float,
    softcap: float,
    sinks: Tensor | None,
    out: Tensor,
) -> None:
    """Computes the attention of a step's rows with several new tokens, as triton_extend.extend_attention does, which has the same
    arguments, or with FlashAttention, if that is chosen for this kind of prompts and takes such attention."""
    head_dim = kv.shape[5]
    tile = tiles.extend_tile(head_dim, qkv.element_size(), scales is not None)
    chosen = tile.flash and tile.flash == flash_attention.kind(head_dim, str(qkv.dtype).removeprefix("torch."))
    if chosen and flash_attention.takes(head_dim, reach, softcap, sinks):
        flash_attention.extend_attention(qkv, kv, layer, heads, block_table, table_rows, query_tiles, contexts, scale, out)
        return
    triton_extend.extend_attention(
        qkv,
        kv,
        scales,
        layer,
        heads,
        block_table,
        table_rows,
        query_tiles.rows,
        query_tiles.firsts,
        query_tiles.tokens,
        query_tiles.starts,
        query_tiles.num_new,
        contexts,
        reach,
        scale,
        softcap,
        sinks,
        INTERPRETED,
        out,
    )


def rope_and_store_latents(
    queries: Tensor,
    down: Tensor,
    norm: Tensor,
    eps: float,
    layer: int,
    heads: LatentHeads,
    batch: DeviceBatch,
    interleaved: bool,
) -> None:
    group, place = batch.group_of(layer)
    kv = (group.kv, group.scales)
    triton_latent.rope_and_store_latents(
        queries, down, group.turns, norm, eps, *kv, place, heads.num_heads, group.kv_slots, interleaved
    )


def latent_attention(
    queries: Tensor,
    layer: int,
    heads: LatentHeads,
    scale: float,
    batch: DeviceBatch,
    tokens: int,
    tile_heads: int,
    product: Callable[[Tensor, Tensor, Tensor], None],
) -> Tensor:
    """Returns the attention [T, H V] of the step's tokens to latents, in the absorbed form: each head's queries are multiplied by
    its key matrix before the attention, and the attention's sums of latents by its value matrix afterwards. Results of tokens that
    belong to no row are undefined.

    scale: factor of the scores. tokens: how many tokens are computed at a time, to bound the work space; all rows that decode are
    computed at once even if they are more. tile_heads: number of heads that read a tile of latents together. product(x [H, T, A],
    weights [H, A, B], out [H, T, B]): multiplies by plain weights and writes the result to `out`."""
    group, place = batch.group_of(layer)
    num_tokens, rank = len(queries), heads.rank
    by_head = queries.view(num_tokens, heads.num_heads, heads.plain_dim + heads.rope_dim)
    out = queries.new_empty(num_tokens, heads.num_heads, heads.value_dim)
    where = (group.kv, group.scales, place, group.block_table, batch.slots)
    at_once = max(tokens, batch.num_decode)  # all rows that decode are among the first tokens
    for first in range(0, num_tokens, at_once):
        own = by_head[first : first + at_once]
        absorbed = queries.new_empty(len(own), heads.num_heads, rank + heads.rope_dim)
        sums = queries.new_empty(len(own), heads.num_heads, rank)
        _product_by_head(own[..., : heads.plain_dim], heads, False, absorbed[..., :rank], product)
        absorbed[..., rank:].copy_(own[..., heads.plain_dim :])
        if batch.num_decode and first == 0:
            triton_latent_attention.decode_attention(absorbed, *where, group.work, scale, tile_heads, INTERPRETED, sums)
        if (tiles := batch.tiles) is not None:
            triton_latent_attention.extend_attention(
                absorbed,
                first,
                *where,
                tiles.rows,
                tiles.firsts,
                tiles.tokens,
                tiles.starts,
                tiles.num_new,
                batch.contexts,
                scale,
                INTERPRETED,
                sums,
            )
        _product_by_head(sums, heads, True, out[first : first + at_once], product)
    return out.view(num_tokens, heads.num_heads * heads.value_dim)


def _product_by_head(
    x: Tensor, heads: LatentHeads, of_values: bool, out: Tensor, product: Callable[[Tensor, Tensor, Tensor], None]
) -> None:
    """Multiplies each head of x [T, H, ...] by the head's value matrix (of_values) or key matrix in heads.up, and writes the
    results to out [T, H, ...] (see triton_latent.product_by_head). product: multiplies if the weights are plain, as in
    latent_attention. Raises TypeError for packed weights."""
    if isinstance(heads.up, Fp8Matrix | Int4Matrix | Int8Matrix | Nvfp4Matrix):
        triton_latent.product_by_head(x, heads, of_values, INTERPRETED, out)
        return
    if isinstance(heads.up, PackedMatrix):
        raise TypeError("there is no kernel for a PackedMatrix on a GPU")
    matrices = heads.up.view(heads.num_heads, heads.plain_dim + heads.value_dim, heads.rank)
    own = matrices[:, heads.plain_dim :].transpose(1, 2) if of_values else matrices[:, : heads.plain_dim]
    product(x.transpose(0, 1), own, out.transpose(0, 1))


def gated_delta(x: Tensor, gates: Tensor, rule: DeltaRule, layer: int, batch: DeviceBatch) -> Tensor:
    """Returns the output [T, V D] of a layer's gated delta rule and updates the rows' states, as Ops.gated_delta does. Unlike
    there, results of tokens that belong to no row are undefined. x, gates: the outputs of the layer's two projections."""
    group, place = batch.group_of(layer)
    out = x.new_empty(len(x), rule.num_value_heads * rule.value_dim)
    triton_delta.gated_delta(
        x,
        gates,
        rule,
        group.kv,
        place,
        batch.block_tokens,
        group.block_table,
        batch.token_rows,
        batch.slots,
        batch.firsts,
        batch.starts,
        batch.contexts,
        batch.tiles is not None,
        out,
    )
    return out


def sample(logits: Tensor, settings: Sequence[Tensor], ids: Tensor, bad: Tensor, *, is_cut: bool = True) -> None:
    """Samples a token for each row of logits [N, V] and writes ids and bad [N] int32, as triton_sampling.sample does. settings:
    temperature, top_p, top_k, min_p, key0 and key1, [N] each. is_cut: False promises that no row has a top_k, top_p or min_p."""
    temperature, top_p, top_k, min_p, key0, key1 = settings
    triton_sampling.sample(logits, temperature, top_p, top_k, min_p, key0, key1, ids, bad, is_cut=is_cut)


def set_entries(target: Tensor, places: Tensor, values: Tensor) -> None:
    triton_inputs.set_entries(target, places, values)


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
    """Returns the token ids and positions [T] int32 and the KV slots [T] int64 of a step's tokens, computed from the columns that
    the host sends, as reference.prepare_inputs does. triton_inputs.prepare_inputs describes the arguments."""
    input_ids, positions = torch.empty_like(token_rows), torch.empty_like(token_rows)
    kv_slots = torch.empty(len(token_rows), dtype=torch.int64, device=token_rows.device)
    triton_inputs.prepare_inputs(
        token_rows, host_ids, slots, firsts, starts, last_ids, block_table, block_tokens, input_ids, positions, kv_slots
    )
    return input_ids, positions, kv_slots


def cos_sin(positions: Tensor, rotary: Rotary) -> Tensor:
    """Returns the cosines and sines with which a layer's rotary embedding rotates P pairs of dimensions at each position [T], as
    [T, 2 P] float32: first all cosines, then all sines."""
    out = torch.empty(len(positions), 2 * len(rotary.inv_freq), dtype=torch.float32, device=positions.device)
    triton_rope.cos_sin(positions, rotary, out)
    return out


def split_contexts(contexts: Tensor, reach: int, target: int, counted: int = 0) -> triton_decode.DecodeWork:
    """Returns the work of a decode step's attention: the contexts [R] int32 (numbers of positions), on the device, cut into about
    `target` pieces (split-K parts). reach: how far back a query attends (see KVGroupSpec). counted: the largest number of KV heads
    of a layer, if attention kernels may combine pieces themselves (tiles.joins_pieces), else 0. Raises ValueError for more than
    triton_decode.MAX_ROWS rows."""
    work = triton_decode.make_work(len(contexts), target, counted, contexts.device)
    triton_decode.split_contexts(contexts, reach, work)
    return work
