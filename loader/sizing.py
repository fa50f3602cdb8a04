"""How many bytes a model takes, from its shape alone: weights, KV and work space. The ledger is built on these figures.

The weight layout is the order and place of every parameter in the model's one memory range. Parameters that one matrix product
reads together (q, k, v; gate, up) lie end to end, so the fused matrix is a view and nothing of the checkpoint is converted. Large
ones begin as far behind a block's boundary as they do in their file, so that direct reads can leave them where they belong.
With quantize = "int8" the projections of the layers are held as int8, and behind each group a float32 scale of every output; what
else there is (embedding, head, norms, biases) stays in the model's dtype.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache

from loader.hf_config import ModelShape
from loader.safetensors import TensorRef

# A first step may be so many times max_num_batched_tokens (engine/steps/first.py), as long as that takes one layer's work space.
FIRST_STEP_SLICES = 4
ALIGN_BYTES = 64
BLOCK_BYTES = 4096  # direct reads are in whole ones, of the file as of memory
MIN_BLOCK_ALIGNED_BYTES = 64 << 10  # what is smaller is copied into place instead of costing up to a block of padding
SCALE_BYTES = 4  # float32, one for each output of a quantised matrix
# Of a quantised matrix in the model's dtype at a time, for steps of many rows.
DEQUANTIZED_BYTES = 4 << 20
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
KV_FP8 = "fp8"  # keys and values as float8_e4m3fn; a head of a token has one scale, of one byte (engine/kernels/triton_fp8.py)
DTYPE_OF = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}  # safetensors' name -> ours
# Logits held at a time; sampling rows beyond it are computed in turn, so a large vocabulary can't outgrow the work space.
LOGITS_BYTES = 8 << 20
# Steps of up to so many rows, and with chunks of prompts of up to so many tokens, are recorded on the cpu device
# (engine/steps/recorded.py), and keep memory for their results. Of longer ones the interpreter takes a few hundredths.
MAX_RECORDED_ROWS, MAX_RECORDED_TOKENS = 128, 256
# Float32 logits the sampler turns into tokens at a time (one row at least); it needs about six copies of them.
SAMPLER_BYTES = 1 << 20
SAMPLER_COPIES = 6
# Queries of one row that attend to its context at a time where that needs a mask.
PREFILL_TILE_TOKENS = 256
MIN_MODEL_LEN = 2048


@dataclass(slots=True, frozen=True)
class WeightSlot:
    """One parameter's place. name: as in the checkpoint; offset_bytes: in the model's weight range. scales_at_bytes: where the
    scales of an int8 matrix are, one float32 for each row; -1: it is held in the model's dtype."""

    name: str
    shape: tuple[int, ...]
    offset_bytes: int
    num_bytes: int
    scales_at_bytes: int = -1


@dataclass(slots=True, frozen=True)
class KVGroupSpec:
    """Layers that share block tables (docs/design.md, KV cache groups). block_bytes: one block over all these layers.

    A `window` layer's query at position p attends to [p - window_tokens + 1, p]; a `full` one's to [0, p], and window_tokens is 0.
    """

    kind: str  # full, window (chunked, latent, state: later families)
    block_tokens: int
    block_bytes: int
    layers: tuple[int, ...]
    window_tokens: int = 0


# one entry: tensors that lie end to end, each (name, shape)
_Group = tuple[tuple[str, tuple[int, ...]], ...]
_Widths = tuple[tuple[str, int], ...]


def _groups(shape: ModelShape) -> list[_Group]:
    if shape.pooling:
        return _encoder_groups(shape)
    hidden, inner = shape.hidden_size, shape.intermediate_size
    query, key = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    groups: list[_Group] = [(("model.embed_tokens.weight", (shape.vocab_size, hidden)),)]
    query_key_value: _Widths = (("q_proj", query), ("k_proj", key), ("v_proj", key))
    gate_up: _Widths = (("gate_proj", inner), ("up_proj", inner))
    if shape.fused_projections:
        query_key_value, gate_up = (("qkv_proj", query + 2 * key),), (("gate_up_proj", 2 * inner),)
    for layer in range(shape.num_layers):
        at = f"model.layers.{layer}."
        attention, mlp = at + "self_attn.", at + "mlp."
        groups.append(((at + "input_layernorm.weight", (hidden,)),))
        groups.append(tuple((f"{attention}{name}.weight", (width, hidden)) for name, width in query_key_value))
        if shape.attention_bias:
            groups.append(tuple((f"{attention}{name}.bias", (width,)) for name, width in query_key_value))
        if shape.qk_norm:
            groups.append(((attention + "q_norm.weight", (shape.head_dim,)),))
            groups.append(((attention + "k_norm.weight", (shape.head_dim,)),))
        groups.append(((attention + "o_proj.weight", (hidden, query)),))
        if shape.output_bias:
            groups.append(((attention + "o_proj.bias", (hidden,)),))
        groups.append(((at + "post_attention_layernorm.weight", (hidden,)),))
        if shape.branch_norms:
            groups.append(((at + "pre_feedforward_layernorm.weight", (hidden,)),))
        groups.append(tuple((f"{mlp}{name}.weight", (width, hidden)) for name, width in gate_up))
        if shape.mlp_bias:
            groups.append(tuple((f"{mlp}{name}.bias", (width,)) for name, width in gate_up))
        groups.append(((mlp + "down_proj.weight", (hidden, inner)),))
        if shape.mlp_bias:
            groups.append(((mlp + "down_proj.bias", (hidden,)),))
        if shape.branch_norms:
            groups.append(((at + "post_feedforward_layernorm.weight", (hidden,)),))
    groups.append((("model.norm.weight", (hidden,)),))
    if not shape.tie_word_embeddings:
        groups.append((("lm_head.weight", (shape.vocab_size, hidden)),))
    return groups


def _encoder_groups(shape: ModelShape) -> list[_Group]:
    hidden, inner = shape.hidden_size, shape.intermediate_size

    def one(name: str, *dims: int) -> list[_Group]:
        return [((f"{name}.weight", dims),), ((f"{name}.bias", dims[:1]),)]

    at = shape.tensor_prefix + "embeddings."
    tables = (("word", shape.vocab_size), ("position", shape.max_position_embeddings), ("token_type", shape.type_vocab_size))
    groups: list[_Group] = [((f"{at}{name}_embeddings.weight", (rows, hidden)),) for name, rows in tables]
    groups += one(at + "LayerNorm", hidden)
    for layer in range(shape.num_layers):
        at = f"{shape.tensor_prefix}encoder.layer.{layer}."
        names = [f"{at}attention.self.{name}" for name in ("query", "key", "value")]
        groups.append(tuple((name + ".weight", (hidden, hidden)) for name in names))
        groups.append(tuple((name + ".bias", (hidden,)) for name in names))
        groups += one(at + "attention.output.dense", hidden, hidden) + one(at + "attention.output.LayerNorm", hidden)
        groups += one(at + "intermediate.dense", inner, hidden)
        groups += one(at + "output.dense", hidden, inner) + one(at + "output.LayerNorm", hidden)
    return groups


def parameter_shapes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Every tensor the checkpoint must hold."""
    return dict(item for group in _groups(shape) for item in group)


def is_ignored_tensor(shape: ModelShape, name: str) -> bool:
    """Tensors some checkpoints carry that follow from others, or that nothing reads: rotary frequencies, the head of a
    tied model, an encoder's pooler."""
    if shape.pooling:
        return name.removeprefix(shape.tensor_prefix).startswith(("pooler.", "embeddings.position_ids"))
    return name.endswith("rotary_emb.inv_freq") or (shape.tie_word_embeddings and name == "lm_head.weight")


def block_offsets(shape: ModelShape, tensors: Iterable[TensorRef]) -> tuple[int, ...]:
    """For ModelShape.block_offsets, from a checkpoint's headers: by group, how far behind a block's boundary its first tensor
    begins in its file; -1 where a direct read is not possible (packed, another dtype, an odd place) or not worth it."""
    stored = {tensor.name: tensor for tensor in tensors if tensor.record is None}
    offsets = []
    for group in _groups(shape):
        first = stored.get(group[0][0])
        num_bytes = sum(math.prod(dims) for _, dims in group) * ITEM_BYTES[shape.dtype]
        direct = first is not None and DTYPE_OF.get(first.dtype) == shape.dtype and first.offset_bytes % 8 == 0
        offsets.append(first.offset_bytes % BLOCK_BYTES if first and direct and num_bytes >= MIN_BLOCK_ALIGNED_BYTES else -1)
    return tuple(offsets)


def weight_layout(shape: ModelShape, dtype: str, quantize: str = "") -> list[WeightSlot]:
    """Places of all parameters in the weight range; each group starts on 64 bytes, or as shape.block_offsets says, quantised
    ones and their scales always on 64 bytes."""
    item_bytes = ITEM_BYTES[dtype]
    groups = _groups(shape)
    block_offsets = shape.block_offsets if dtype == shape.dtype else ()
    slots = []
    offset = 0
    for group, block_offset in zip(groups, block_offsets or (-1,) * len(groups), strict=True):
        if quantize == "int8" and group[0][0].endswith("_proj.weight"):
            offset = _aligned(offset)
            scales_at = _aligned(offset + sum(math.prod(dims) for _, dims in group))
            for name, dims in group:
                slots.append(WeightSlot(name, dims, offset, math.prod(dims), scales_at))
                offset += math.prod(dims)
                scales_at += dims[0] * SCALE_BYTES
            offset = scales_at
            continue
        offset = _aligned(offset) if block_offset < 0 else offset + (block_offset - offset) % BLOCK_BYTES
        for name, dims in group:
            num_bytes = math.prod(dims) * item_bytes
            slots.append(WeightSlot(name, dims, offset, num_bytes))
            offset += num_bytes
    return slots


@lru_cache(maxsize=4096)
def weights_bytes(shape: ModelShape, dtype: str, quantize: str = "") -> int:
    """What the engine maps for the weights held as `dtype`, or quantised: the layout, or the one without block offsets where
    that is longer."""
    layouts = {replace(shape, block_offsets=()), shape}
    ends = (weight_layout(one, dtype, quantize)[-1] for one in layouts)  # a norm or the head: never quantised
    return max(_aligned(last.offset_bytes + last.num_bytes) for last in ends)


def kv_head_bytes(head_dim: int, kv_dtype: str) -> int:
    """One token's keys, or values, in one KV head. kv_dtype: the model's dtype, or KV_FP8."""
    return head_dim + 1 if kv_dtype == KV_FP8 else head_dim * ITEM_BYTES[kv_dtype]


def kv_bytes_per_token(shape: ModelShape, kv_dtype: str) -> int:
    """Keys and values of one token over all layers; an encoder keeps none."""
    if shape.pooling:
        return 0
    return shape.num_layers * 2 * shape.num_kv_heads * kv_head_bytes(shape.head_dim, kv_dtype)


def block_bytes(shape: ModelShape, kv_dtype: str, block_tokens: int) -> int:
    """One KV block of a dense model's only KV cache group."""
    return kv_bytes_per_token(shape, kv_dtype) * block_tokens


def kv_groups(shape: ModelShape, kv_dtype: str, block_tokens: int) -> tuple[KVGroupSpec, ...]:
    """Layers by their window: full ones first, then the others by size. A block holds the layers of its group only."""
    windows = shape.layer_windows or (0,) * shape.num_layers
    layer_bytes = 2 * shape.num_kv_heads * kv_head_bytes(shape.head_dim, kv_dtype) * block_tokens
    groups = []
    for window in sorted(set(windows)):
        layers = tuple(layer for layer, own in enumerate(windows) if own == window)
        kind = "window" if window else "full"
        groups.append(KVGroupSpec(kind, block_tokens, layer_bytes * len(layers), layers, window))
    return tuple(groups)


def group_chunks(group: KVGroupSpec, max_model_len: int, max_num_batched_tokens: int, chunk_bytes: int) -> int:
    """Chunks that hold all blocks of one sequence of max_model_len in one group, and as many as one block takes, because blocks
    don't begin and end where chunks do. A window group keeps the window and the chunk of a prompt being computed."""
    blocks = -(-max_model_len // group.block_tokens)
    if group.window_tokens:
        blocks = min(blocks, -(-(group.window_tokens + max_num_batched_tokens) // group.block_tokens) + 1)
    return -(-blocks * group.block_bytes // chunk_bytes) - (-group.block_bytes // chunk_bytes)


def kv_reserved_bytes(
    shape: ModelShape, kv_dtype: str, max_model_len: int, block_tokens: int, max_num_batched_tokens: int, chunk_bytes: int
) -> int:
    """KV of one sequence of max_model_len over all groups, each in chunks of its own; without the one chunk that the ledger adds
    for every model."""
    groups = kv_groups(shape, kv_dtype, block_tokens)
    return (sum(group_chunks(group, max_model_len, max_num_batched_tokens, chunk_bytes) for group in groups) - 1) * chunk_bytes


def logits_rows(shape: ModelShape, dtype: str, max_sequences: int) -> int:
    """Sampling rows whose logits are computed at a time: a multiple of 8, in which max_sequences find room if it fits, or fewer."""
    wanted = max_sequences if max_sequences < 8 else -(-max_sequences // 8) * 8
    rows = max(1, min(wanted, LOGITS_BYTES // (shape.vocab_size * ITEM_BYTES[dtype])))
    return rows if rows < 8 else rows // 8 * 8


def recorded_tokens(num_tokens: int) -> int:
    """The next of few token counts, for each of which a step with chunks of prompts is recorded: whole tiles of the matrix unit."""
    step = 16 if num_tokens <= 128 else 32
    return -(-num_tokens // step) * step


def recorded_bytes(shape: ModelShape, dtype: str, max_sequences: int, max_num_batched_tokens: int) -> int:
    """Upper bound of the memory that results of recorded steps lie in, whatever else runs: what lives at a time in a layer, or with
    the logits. Not in it: 0.5 MB for each thread that packs weights (scratch_words of cpu_amx_linear.py, scratch_floats of
    cpu_widened_linear.py)."""
    query, key = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    layer = max(2 * query + 2 * key, 3 * shape.intermediate_size)
    # residual, update, normed, output, and as much for gaps between those that are taken and given back
    around = 8 * shape.hidden_size
    rows = min(logits_rows(shape, dtype, max_sequences), MAX_RECORDED_ROWS)
    tokens = recorded_tokens(min(max_num_batched_tokens, MAX_RECORDED_TOKENS))
    return max(rows * (around + max(layer, shape.vocab_size)), tokens * (around + layer)) * ITEM_BYTES[dtype]


def sampler_rows(vocab_size: int) -> int:
    """Rows that are sampled from at a time (greedy rows need no copies and are not counted)."""
    return max(1, SAMPLER_BYTES // (vocab_size * 4))


def work_space_bytes(
    shape: ModelShape,
    dtype: str,
    max_num_batched_tokens: int,
    max_sequences: int,
    max_model_len: int | None = None,
    quantize: str = "",
) -> int:
    """Upper bound of what one step allocates beside weights and KV: activations of one layer, or the logits being sampled; and of
    what recorded steps keep between steps.

    max_model_len: longest context; one prefill row at a time gathers its keys and values (default: the checkpoint's length).
    """
    if shape.pooling:
        return _encoder_work_space_bytes(shape, dtype, max_num_batched_tokens)
    tokens = max_num_batched_tokens + max_sequences
    item, hidden = ITEM_BYTES[dtype], shape.hidden_size
    query, key = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    context = min(max_model_len or shape.max_position_embeddings, shape.max_position_embeddings)
    if all(shape.layer_windows):
        context = min(context, max(shape.layer_windows, default=context) + max_num_batched_tokens)
    residual = tokens * hidden * (3 * item + 2 * 4)  # residual, normed, output; two float32 copies inside the norm
    attention = tokens * (query + 2 * key) * (2 * item + 4) + tokens * query * (item + 4) + tokens * shape.head_dim * 2 * 4
    tile = min(PREFILL_TILE_TOKENS, max_num_batched_tokens)
    # one row's context as gathered and as scaled_dot_product_attention repeats it for each query head; its causal mask
    gathered = context * 2 * (2 * key + query) * item + tile * context * 5
    if shape.attention_softcap:  # scores of one KV head's queries as products, in float32 and as weights
        gathered += shape.num_heads // shape.num_kv_heads * tile * context * (2 * item + 2 * 4)
    mlp = tokens * shape.intermediate_size * 4 * item
    logits = logits_rows(shape, dtype, max_sequences) * (shape.vocab_size + hidden) * item
    sampling = min(sampler_rows(shape.vocab_size), max_sequences) * shape.vocab_size * 4 * SAMPLER_COPIES
    if quantize:  # a part of a matrix, and its products before they are scaled
        mlp += DEQUANTIZED_BYTES + tokens * 2 * shape.intermediate_size * item
    if not any(shape.layer_windows):  # the residual and its update in a first step's other slices
        residual += (FIRST_STEP_SLICES - 1) * max_num_batched_tokens * (2 * hidden * item + shape.head_dim * 4)
    # measured: a quarter more than the arrays, for oneDNN's scratch and what malloc keeps
    step = (residual + max(attention + gathered, mlp, logits + sampling) + tokens * 64) * 5 // 4
    return step + recorded_bytes(shape, dtype, max_sequences, max_num_batched_tokens)


def _encoder_work_space_bytes(shape: ModelShape, dtype: str, max_num_batched_tokens: int) -> int:
    tokens, item = max(max_num_batched_tokens, shape.max_position_embeddings), ITEM_BYTES[dtype]
    context = min(tokens, shape.max_position_embeddings)
    # hidden, sum, normed, mixed, qkv; or hidden and the MLP's two; scores of the longest text, should they be written out
    widths = shape.hidden_size * (6 * item + 4) + max(3 * shape.hidden_size, 2 * shape.intermediate_size) * item
    scores = shape.num_heads * context * context * 4
    return (tokens * (widths + 64) + scores) * 5 // 4


def default_max_model_len(shape: ModelShape, kv_dtype: str, device_budget_bytes: int) -> int:
    """The checkpoint's length, or what a quarter of the device holds as KV if that is less (but 2,048 at least). A layer with a
    window takes no more than that."""
    if shape.pooling:
        return shape.max_position_embeddings
    layer_bytes = kv_bytes_per_token(shape, kv_dtype) // shape.num_layers
    windows = [window for window in shape.layer_windows if window]
    left_bytes = max(0, device_budget_bytes // 4 - sum(windows) * layer_bytes)
    fits = device_budget_bytes // 4 // kv_bytes_per_token(shape, kv_dtype)  # shorter than every window
    if windows and fits > max(windows):
        num_full = shape.num_layers - len(windows)
        fits = left_bytes // (num_full * layer_bytes) if num_full else shape.max_position_embeddings
    return min(shape.max_position_embeddings, max(MIN_MODEL_LEN, fits))


def _aligned(offset: int) -> int:
    return -(-offset // ALIGN_BYTES) * ALIGN_BYTES
