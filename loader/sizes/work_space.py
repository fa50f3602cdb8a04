"""Computes the work space of models on a cpu device: the memory that one step allocates besides weights and KV. Also defines in
what portions steps compute logits, samples and attention, so that they need no more memory. loader/sizes/gpu_sizing.py does the
same for GPUs.
"""

from __future__ import annotations

from loader.formats.alignment import aligned
from loader.formats.int8 import WIDENED_BYTES
from loader.formats.plain import PLAIN
from loader.formats.weight_format import WeightFormat
from loader.shapes.dtypes import ITEM_BYTES
from loader.shapes.kv_layout import is_bounded
from loader.shapes.model_shape import ModelShape

# A first step may have up to so many times max_num_batched_tokens (engine/lifecycle/first_step.py). It is computed in slices,
# one at a time in each layer, so only its states take more work space than those of other steps.
FIRST_STEP_SLICES = 4
# Logits held at a time; sampling rows beyond it are computed in turn, so a large vocabulary can't outgrow the work space.
LOGITS_BYTES = 8 << 20
# Steps of up to so many rows, and with chunks of prompts of up to so many tokens, are recorded on the cpu device
# (engine/cpu/recording/recorded.py), and keep memory for their results. In longer ones the interpreter takes a few hundredths of
# the time.
MAX_RECORDED_ROWS, MAX_RECORDED_TOKENS = 128, 256
# Float32 logits the sampler turns into tokens at a time (one row at least); it needs about six copies of them.
SAMPLER_BYTES = 1 << 20
SAMPLER_COPIES = 6
# Queries of one row whose attention is computed at a time if it needs a mask.
PREFILL_TILE_TOKENS = 256
# Queries of an encoder whose attention is computed at a time (engine/layers/encoder_attention.py), which bounds the memory of
# scores.
ENCODER_TILE_TOKENS = 256
# Queries that are mapped to the latents' space at a time (engine/cpu/latents.py).
ABSORBED_TOKENS = 64


# A prompt passes through the stages of a pipeline in parts of at most so many tokens, so that several stages compute parts of it at
# a time. So many tokens are enough for matrix products to run at their full rate.
MOST_STAGED_TOKENS = 512


def staged_tokens(max_sequences: int, max_num_batched_tokens: int) -> int:
    """Returns the most tokens that a step of a model with pipeline stages may have. It has either one token for each sequence, or a
    part of a prompt of at most MOST_STAGED_TOKENS tokens."""
    return max(max_sequences, min(MOST_STAGED_TOKENS, max_num_batched_tokens))


def handed_bytes(shape: ModelShape, dtype: str, num_tokens: int) -> int:
    """Returns the bytes that a step passes from one pipeline stage to the next: for each of its num_tokens tokens two hidden
    states. They are the residual and either the last layer's output, which has not been added to the residual yet, or (in models
    with per-layer inputs) the token's embedding."""
    return aligned(2 * num_tokens * shape.hidden_size * ITEM_BYTES[dtype])


def logits_rows(shape: ModelShape, dtype: str, max_sequences: int) -> int:
    """Returns for how many sampling rows of a step the logits are computed at a time. It is max_sequences, rounded up to a multiple
    of 8 if it is above 8. If the logits of so many rows exceed LOGITS_BYTES, it is the number of rows that fit, at least one,
    rounded down to a multiple of 8 if it is above 8."""
    wanted = max_sequences if max_sequences < 8 else -(-max_sequences // 8) * 8
    rows = max(1, min(wanted, LOGITS_BYTES // (shape.vocab_size * ITEM_BYTES[dtype])))
    return rows if rows < 8 else rows // 8 * 8


def logits_values(shape: ModelShape) -> int:
    """Returns how many elements the logits of one sampling row take: one for each token of the vocabulary. A device's share of a
    split model has, in addition, room for the part of the logits that it computes itself."""
    own = shape.vocab_size // shape.split.size if shape.split is not None else 0
    return shape.vocab_size + own


def recorded_tokens(num_tokens: int) -> int:
    """Returns num_tokens rounded up to a number of tokens for which steps with parts of prompts are recorded. These numbers are
    multiples of 16 up to 128, then multiples of 32, because the processor's matrix unit (AMX) computes 16 tokens together."""
    step = 16 if num_tokens <= 128 else 32
    return -(-num_tokens // step) * step


def recorded_bytes(shape: ModelShape, dtype: str, max_sequences: int, max_num_batched_tokens: int) -> int:
    """Returns an upper bound of the bytes that recorded steps use for their results: those of one layer or the logits, whichever
    are more. About 0.5 MB for each thread that packs weights are not included (scratch_words of amx_linear.py, scratch_floats of
    widened_linear.py)."""
    query, key = shape.num_heads * shape.widest_head_dim, shape.widest_key
    # queries, keys and values, with attention's result or the normalised queries
    attention = (3 if shape.whole_width_norms else 2) * query + 2 * key
    if (latent := shape.latent) is not None:  # latents, those of queries once more as they are normalised
        attention = 2 * latent.query_rank + latent.token_values + query + shape.num_heads * latent.value_dim
    if shape.gated_attention:  # queries and keys with their gates, and without
        attention += 2 * query + 2 * key
    attention += keys_as_values(shape)
    delta = delta_bytes(shape, dtype)
    layer = max(attention, 3 * shape.widest_inner_size, max(delta, expert_bytes(shape, dtype)) // ITEM_BYTES[dtype])
    # residual, update, normed, output, and as much for gaps between those that are taken and given back
    around = (10 if shape.parallel_branches else 8) * shape.hidden_size  # attention's result stays beside the MLP's
    around += 3 * input_values(shape) + passed_values(shape) + beside_values(shape)
    rows = min(logits_rows(shape, dtype, max_sequences), MAX_RECORDED_ROWS)
    tokens = recorded_tokens(min(max_num_batched_tokens, MAX_RECORDED_TOKENS))
    return max(rows * (around + max(layer, logits_values(shape))), tokens * (around + layer)) * ITEM_BYTES[dtype]


def expert_bytes(shape: ModelShape, dtype: str) -> int:
    """Returns an upper bound of the bytes that the experts of one layer take for each token of a step; 0 without experts. The
    router's choice does not matter, because each token passes through the same number of experts."""
    experts = shape.experts
    if experts is None:
        return 0
    item, hidden, inner = ITEM_BYTES[dtype], shape.hidden_size, experts.intermediate_size
    # for each expert of a token: its input beside gate and up, or these beside their product; its place, its weight
    grouped = experts.num_chosen * ((max(hidden, inner) + 2 * inner) * item + 16)
    # the reference computes one expert at a time, perhaps for all tokens: its arrays, and its output and their sum in float32
    reference = (2 * hidden + 4 * inner) * item + 3 * hidden * 4
    shared = 3 * experts.shared_size * item + hidden * item
    scores = (experts.num_experts + 1) * (item + 24)  # also sorted, with the places they had, and their softmax
    if experts.sigmoid is not None:  # in float32, as is the router's input; the scores of what groups leave are sorted, too
        scores = experts.num_experts * 40 + hidden * 4
    return max(grouped, reference) + shared + hidden * item + scores


def input_values(shape: ModelShape) -> int:
    """Returns how many elements the per-layer inputs (engine/layers/layer_inputs.py) of one token have, in all layers of the model
    or of a pipeline stage together; 0 if layers have no such inputs. While they are computed, memory for three times as many is in
    use."""
    return 0 if shape.layer_inputs is None else len(shape.own_layers) * shape.layer_inputs.width


def passed_values(shape: ModelShape) -> int:
    """Returns how many elements for each token a pipeline stage keeps, besides the residual, to pass them on to the next stage: the
    token's embedding, from which later stages compute the per-layer inputs of their layers. 0 if the model has no stages or no
    per-layer inputs."""
    in_stages = shape.split is not None and shape.split.num_stages > 1
    return shape.hidden_size if in_stages and shape.layer_inputs is not None else 0


def beside_values(shape: ModelShape) -> int:
    """Returns how many elements for each token a layer that has both an MLP and experts takes in addition: the MLP's output, and
    the inputs of router and experts. 0 for a model without such layers."""
    return 4 * shape.hidden_size if shape.experts is not None and shape.experts.beside else 0


def keys_as_values(shape: ModelShape) -> int:
    """Returns how many elements a copy of one token's queries and keys has. A layer needs this copy if one projection makes both
    keys and values. 0 if no layer has such a projection."""
    tied = [heads for heads in shape.kinds_of_heads if heads.keys_are_values]
    return max((heads.head_dim * (shape.num_heads + heads.num_kv_heads) for heads in tied), default=0)


def delta_bytes(shape: ModelShape, dtype: str) -> int:
    """Returns an upper bound of the bytes that a layer of the gated delta rule takes for each token of a step; 0 if the model has
    no such layers."""
    if (delta := shape.delta) is None:
        return 0
    item, values = ITEM_BYTES[dtype], delta.num_value_heads * delta.value_dim
    # what the projections made, the convolution's result in float32, the heads' outputs; these once more where a kernel norms them
    return (delta.conv_width + values + 2 * delta.num_value_heads) * item + delta.conv_width * 4 + 3 * values * item


def predictor_values(shape: ModelShape) -> int:
    """Returns how many elements for each token of a step the layer that drafts tokens takes, in addition to those of the model's
    other layers; 0 if no such layer is loaded."""
    if not shape.predicts:
        return 0
    if (eagle := shape.eagle) is None:  # all normed hidden states, beside the embeddings that follow, both normed, and both as one
        return 6 * shape.hidden_size
    own = eagle.layer
    heads = (own.num_heads + 2 * own.num_kv_heads) * own.head_dim
    # the states it reads, these normed and as one; its own, the embeddings, both normed and as one; a layer
    return 3 * len(eagle.read_layers) * shape.hidden_size + 9 * own.hidden_size + 4 * heads + 4 * own.intermediate_size


def sampler_rows(vocab_size: int) -> int:
    """Returns how many rows of logits the sampler of the reference implementation samples at a time. Only rows that are not sampled
    greedily count, because the others need no copies of their logits."""
    return max(1, SAMPLER_BYTES // (vocab_size * 4))


def work_space_bytes(
    shape: ModelShape,
    dtype: str,
    max_num_batched_tokens: int,
    max_sequences: int,
    max_model_len: int | None = None,
    weight_format: WeightFormat = PLAIN,
) -> int:
    """Returns an upper bound of the bytes that one step on a `cpu` device allocates besides weights and KV: those of the
    activations of a layer or of the logits that are sampled, whichever are more, and of what recorded steps keep between steps.

    max_model_len: the longest context, since the reference implementation copies the keys and values of one row's context at a
    time; None: the checkpoint's longest context."""
    context = min(max_model_len or shape.max_position_embeddings, shape.max_position_embeddings)
    if shape.is_encoder:
        return _encoder_work_space_bytes(shape, dtype, max_num_batched_tokens, context)
    handed = 0
    if shape.split is not None and shape.split.stage_ends:
        max_num_batched_tokens = staged_tokens(max_sequences, max_num_batched_tokens)
        handed = shape.split.num_stages * handed_bytes(shape, dtype, max_num_batched_tokens)
    tokens = max_num_batched_tokens + max_sequences
    item, hidden = ITEM_BYTES[dtype], shape.hidden_size
    query, key = shape.num_heads * shape.widest_head_dim, shape.widest_key
    if all(shape.layer_windows):
        context = min(context, max(shape.layer_windows, default=context) + max_num_batched_tokens)
    residual = tokens * hidden * (3 * item + 2 * 4)  # residual, normed, output; two float32 copies inside the norm
    if shape.parallel_branches:  # attention's result, kept during the MLP
        residual += tokens * hidden * item
    residual += tokens * (3 * input_values(shape) + passed_values(shape) + beside_values(shape)) * item
    residual += tokens * predictor_values(shape) * item
    attention = tokens * (query + 2 * key) * (2 * item + 4) + tokens * query * (item + 4) + tokens * shape.widest_head_dim * 2 * 4
    if shape.whole_width_norms:  # the queries, and their norms
        attention += tokens * 2 * query * item
        if shape.split is not None:  # in float32, too, as they are and divided
            attention += tokens * 2 * query * 4
    tile = min(PREFILL_TILE_TOKENS, max_num_batched_tokens)
    # one row's context as gathered and as scaled_dot_product_attention repeats it for each query head; its causal mask
    gathered = context * 2 * (2 * key + query) * item + tile * context * 5
    if shape.attention_softcap:  # scores of one KV head's queries as products, in float32 and as weights
        gathered += shape.num_heads // shape.fewest_kv_heads * tile * context * (2 * item + 2 * 4)
    if shape.latent is not None:
        attention, gathered = _latent_bytes(shape, tokens, context, item)
    if shape.gated_attention:  # queries with their gates, and the attention output that the gates multiply
        attention += tokens * (2 * query + 2 * key + query) * item
    attention += tokens * keys_as_values(shape) * item
    attention = max(attention, tokens * delta_bytes(shape, dtype))
    mlp = tokens * max(shape.widest_inner_size * 4 * item, expert_bytes(shape, dtype))
    logits = logits_rows(shape, dtype, max_sequences) * (logits_values(shape) + hidden) * item
    if shape.eagle is not None:  # logits of the head's own tokens, too
        logits += logits_rows(shape, dtype, max_sequences) * shape.eagle.draft_vocab_size * item
    sampling = min(sampler_rows(shape.vocab_size), max_sequences) * shape.vocab_size * 4 * SAMPLER_COPIES
    if shape.pooling:  # no logits, but the vectors of all rows, in float32 and after scaling
        logits, sampling = max_sequences * hidden * (item + 2 * 4), 0
    if weight_format.widened_bytes:  # a part of a matrix, and its products before they are scaled
        mlp += weight_format.widened_bytes + tokens * 2 * shape.widest_inner_size * item
    if not is_bounded(shape):  # the residual and its update in a first step's other slices
        residual += (FIRST_STEP_SLICES - 1) * max_num_batched_tokens * (2 * hidden * item + shape.widest_head_dim * 4)
    # measured: a quarter more than the arrays, for oneDNN's scratch and what malloc keeps
    step = (residual + max(attention + gathered, mlp, logits + sampling) + tokens * 64) * 5 // 4
    return step + recorded_bytes(shape, dtype, max_sequences, max_num_batched_tokens) + handed


def _latent_bytes(shape: ModelShape, tokens: int, context: int, item: int) -> tuple[int, int]:
    """Returns upper bounds of the bytes that latent attention takes (engine/cpu/latents.py): (for all tokens of a step, for the
    context of one row). tokens, context: numbers of tokens. item: bytes of an element of the model's dtype."""
    latent, heads = shape.latent, shape.num_heads
    assert latent is not None
    down, query, value = latent.query_rank + latent.token_values, heads * shape.head_dim, heads * latent.value_dim
    # the norms and rotations are in float32; queries and their absorbed form, and what an assignment of parts copies
    by_token = (down + query) * (2 * item + 8) + value * item
    absorbed = ABSORBED_TOKENS * heads * (shape.head_dim + 2 * latent.token_values) * 4
    # latents as stored and in float32; scores of all heads of a query, or keys and values of a head and scores of a tile
    by_position = latent.token_values * (item + 4) + 2 * 4 * max(heads, PREFILL_TILE_TOKENS)
    by_position += (2 * shape.head_dim + latent.value_dim) * 4
    return tokens * by_token, absorbed + context * by_position + 2 * WIDENED_BYTES


def _encoder_work_space_bytes(shape: ModelShape, dtype: str, max_num_batched_tokens: int, context: int) -> int:
    """Returns an upper bound of the bytes that one step of an encoder allocates. context: number of tokens of the longest text;
    such a text is computed in one step even if it is longer than max_num_batched_tokens."""
    tokens, item, hidden = max(max_num_batched_tokens, context), ITEM_BYTES[dtype], shape.hidden_size
    attention, mlp = 3 * hidden * item, 2 * shape.intermediate_size * item
    if shape.local_rope is not None:  # queries and keys are rotated in float32, and the MLP has a gate
        attention, mlp = attention + 2 * hidden * (4 * 4 + item), 2 * mlp
    # hidden, sum, normed, mixed, qkv; or hidden and the MLP's two; scores of a tile of the longest text, should they be written out
    widths = hidden * (6 * item + 4) + max(attention, mlp)
    scores = min(context, ENCODER_TILE_TOKENS) * context * (shape.num_heads * 4 + 5)
    return (tokens * (widths + 64) + scores) * 5 // 4
