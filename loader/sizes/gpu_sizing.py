"""Computes the work space of models on a GPU: the memory that one step allocates besides weights and KV. It differs from that on
cpu devices (loader/sizes/work_space.py), because attention on a GPU does not copy KV, and the logits of many rows are computed at
once.
"""

from __future__ import annotations

from loader.files import frame
from loader.formats.registry import stored_format
from loader.shapes.dtypes import ITEM_BYTES
from loader.shapes.model_shape import ModelShape
from loader.sizes.work_space import (
    MOST_STAGED_TOKENS,
    beside_values,
    delta_bytes,
    input_values,
    keys_as_values,
    passed_values,
    predictor_values,
)

LOGITS_ROWS = 256  # sampling rows whose logits are computed at a time
# Rows edited at a time (engine/cuda/edited.py), and penalised tokens of these rows together; a single row may have more tokens.
EDITED_ROWS, EDITED_TOKENS = 64, 1 << 20
# Words of 4 bytes for the tokens, biases and banned ids of such rows, if a graph samples them; there is room for all masks besides.
EDITED_GRAPH_WORDS = 1 << 18
# Number of pieces, besides one for each row, into which attention divides the contexts of a decode step: about eight for each of
# 256 multiprocessors. Each piece has results in float32.
DECODE_PIECES = 2048
# For latent attention: heads that read a tile of latents together, and tokens whose queries are in the latents' space at a time.
LATENT_HEADS, LATENT_TOKENS = 32, 1024
# Sampling has a program for each SAMPLING_TOKENS logits of a row, which writes SAMPLING_BYTES; each row has as many bytes again.
SAMPLING_TOKENS, SAMPLING_BYTES = 4096, 1024
# A token's product with the `down` matrices of its LoRA adapter (kernels/triton_adapters.py): 256 numbers in float32 for each of up
# to four matrices. Few tokens take several times as much, but no more than ADAPTER_TOKENS do.
ADAPTER_BYTES, ADAPTER_TOKENS = 4 * 4 * 256, 512
# Memory for a predictor's drafts after one row: a few columns for each drafted token, both as sent and as picked.
DRAFT_BYTES = 512
# Memory that torch's allocator holds besides the arrays that exist at a time: half as much as these in free parts of segments, and
# two segments of 20 MiB that are mostly unused. Only the latter are in this constant. tests/engine/test_step_memory.py checks it.
SEGMENTS_BYTES = 2 * (20 << 20)
# cuBLAS's work space: eight buffers of 4 MiB on GPUs of capability 9.0, as torch chooses (CublasHandlePool.cpp), less on earlier
# ones. torch keeps one for each pair of a thread's cuBLAS handle and a stream. A process has at most four, because it loads one
# model at a time: the loop's handle multiplies in steps and in captures, and has multiplied in a load if the thread of one that has
# ended had it before; and the next load's thread has a handle of its own.
CUBLAS_BYTES = 8 * (4 << 20)
LIBRARY_BYTES = 4 * CUBLAS_BYTES
# Memory that NCCL takes on each device of a group for one communicator: its channels' buffers, and its kernels. An assumption until
# it is measured. It is counted once a device, however many split models the device has a share of.
COMMUNICATOR_BYTES = 512 << 20
# A rank's region of the memory that GPUs map from each other (engine/cuda/peer_regions.py): what a GPU allocates at least
PEER_REGION_BYTES = 2 << 20
# Buffers that packed weights pass through, as many again while their speed is measured, and the decoded values of a frame of which
# a share of a split model keeps a part (engine/cuda/frames.py).
PACKED_BYTES = 2 * frame.frame_bytes(frame.FRAME_VALUES, frame.FRAME_VALUES) + frame.FRAME_VALUES * frame.VALUE_BYTES


def gpu_work_space_bytes(shape: ModelShape, dtype: str, max_num_batched_tokens: int, max_sequences: int) -> int:
    """Returns an upper bound of the bytes that one step allocates on a GPU besides weights and KV; 0 for encoders, which GPUs do
    not serve. shape: the shape of a model or of a device's share. max_num_batched_tokens, max_sequences: most tokens and most
    sequences of a step.

    Included is also what GPU libraries and a load of a model take, and what a device's share of a split model keeps for collectives
    with other devices. Other memory that a loaded model keeps between steps (block tables, CUDA graphs) is not: it comes from the
    part of the device that the default budget leaves free."""
    if shape.is_encoder:
        return 0
    rows = min(LOGITS_ROWS, max(1, max_sequences))
    held = stored_format(shape)
    beside = LIBRARY_BYTES + PACKED_BYTES + held.load_bytes + _exchange_bytes(shape, rows, ITEM_BYTES[dtype])
    return gpu_step_bytes(shape, dtype, max_num_batched_tokens, max_sequences) + beside


def gpu_step_bytes(shape: ModelShape, dtype: str, max_num_batched_tokens: int, max_sequences: int) -> int:
    """Returns how many of the bytes in gpu_work_space_bytes are for the step's own tensors, with what torch's allocator takes in
    addition (checked by tests/engine/test_step_memory.py). Memory for collectives, libraries and loads is left out. shape: the
    shape of a model or of a device's share. max_num_batched_tokens, max_sequences: most tokens and most sequences of a step."""
    tokens, item, hidden = max(max_num_batched_tokens, max_sequences), ITEM_BYTES[dtype], shape.hidden_size
    query, key = shape.num_heads * shape.widest_head_dim, shape.widest_key
    # residual, its norm, a product's result; with parallel branches, the results of attention and of the MLP
    residual = tokens * hidden * (4 if shape.parallel_branches else 3) * item
    residual += tokens * (3 * input_values(shape) + passed_values(shape) + beside_values(shape)) * item
    residual += tokens * predictor_values(shape) * item + max_sequences * DRAFT_BYTES * shape.predicts
    num_pieces = max_sequences + -(-DECODE_PIECES // decode_programs(shape, shape.fewest_kv_heads))
    if (latent := shape.latent) is None:
        counters = 2 * max(heads.num_kv_heads for heads in shape.kinds_of_heads)  # of layers with windows and without
        pieces = num_pieces * (shape.num_heads * (shape.widest_head_dim + 1) + counters) * 4
        attention = tokens * ((query + 2 * key) + (2 if shape.whole_width_norms else 1) * query) * item + pieces
    else:
        pieces = num_pieces * shape.num_heads * (latent.rank + 1) * 4
        # latents; latents of queries, before and after their norm; queries; attention's result
        by_token = 2 * latent.query_rank + latent.token_values + query + shape.num_heads * latent.value_dim
        # some queries in the latents' space, and their sums
        absorbed = min(tokens, max(LATENT_TOKENS, max_sequences)) * shape.num_heads * (latent.token_values + latent.rank)
        attention = (tokens * by_token + absorbed) * item + pieces
    if shape.whole_width_norms and shape.split is not None:  # queries in float32, as they are and divided
        attention += tokens * 2 * query * 4
    if shape.gated_attention:  # queries with their gates, and the attention output that the gates multiply
        attention += tokens * (2 * query + 2 * key + query) * item
    attention += tokens * keys_as_values(shape) * item
    attention = max(attention, tokens * delta_bytes(shape, dtype))
    mlp = tokens * max(shape.widest_inner_size * 3 * item, _expert_bytes(shape, item))
    held = stored_format(shape)
    if held.reorders:  # a copy of a product's inputs
        attention += tokens * max(hidden, query) * item
        mlp += tokens * max(hidden, shape.widest_inner_size) * item
    rows = min(LOGITS_ROWS, max(1, max_sequences))
    # log-probabilities of prompts are computed from the logits of as many tokens, however few sequences there are
    logits = min(LOGITS_ROWS, tokens) * (_logits_values(shape) + hidden) * item + sampling_bytes(rows, shape.vocab_size)
    logits += edited_bytes(min(rows, EDITED_ROWS), shape)
    if shape.eagle is not None:  # logits of the head's own tokens, too
        logits += rows * shape.eagle.draft_vocab_size * item
    if shape.pooling:  # no logits, but the vectors of all rows, in float32 and after scaling
        logits = max_sequences * hidden * (item + 2 * 4)
    adapters = max(tokens, ADAPTER_TOKENS) * ADAPTER_BYTES
    return (residual + max(attention + adapters, mlp + adapters, logits) + tokens * 64) * 3 // 2 + SEGMENTS_BYTES


def _logits_values(shape: ModelShape) -> int:
    """Returns how many elements the logits of one row take: one for each token of the vocabulary. A device's share of a split model
    has, in addition, the part of the logits that it computes, and a buffer in which the parts of all devices arrive."""
    return shape.vocab_size if shape.split is None else shape.vocab_size // shape.split.size + 2 * shape.vocab_size


def _exchange_bytes(shape: ModelShape, rows: int, item: int) -> int:
    """Returns the bytes that a device's share of a split model keeps for collectives with the other devices; 0 for a whole model.
    They are for the logits of `rows` rows; if several devices share a stage, the communicator and the memory region that these
    devices map; and for a pipeline stage the buffers of two hidden states that its CUDA graphs read and write
    (engine/cuda/stages.py). item: bytes of an element of the model's dtype."""
    if shape.split is None:
        return 0
    states = 2 * MOST_STAGED_TOKENS * shape.hidden_size * item if shape.split.num_stages > 1 else 0
    return (COMMUNICATOR_BYTES + PEER_REGION_BYTES if shape.split.size > 1 else 0) + states + rows * shape.vocab_size * item


def sampling_bytes(rows: int, vocab_size: int) -> int:
    """Returns the bytes that sampling from `rows` rows of logits takes besides the logits."""
    return rows * (-(-vocab_size // SAMPLING_TOKENS) + 1) * SAMPLING_BYTES


def edited_bytes(rows: int, shape: ModelShape) -> int:
    """Returns the bytes that are needed in addition if the engine edits the logits of `rows` rows before sampling, by masks,
    penalties or biases: the logits in float32, the counts of tokens, the masks, and the ids of the counted tokens."""
    return rows * (shape.vocab_size * (4 + 4) + shape.vocab_size // 8) + 4 * max(EDITED_TOKENS, shape.max_position_embeddings)


def edited_graph_words(vocab_size: int) -> int:
    """Returns the size, in words of 4 bytes, of the buffers that a model keeps once CUDA graphs sample rows whose logits are
    edited. They hold these rows' masks, tokens, biases and banned ids (engine/cuda/edited_graphs.py)."""
    return EDITED_ROWS * -(-vocab_size // 32) + EDITED_GRAPH_WORDS


def decode_programs(shape: ModelShape, num_kv_heads: int) -> int:
    """Returns how many thread blocks of a GPU read the same section of a sequence's context in a decode step: one for each KV head
    of a layer. With latent attention there is one for each LATENT_HEADS query heads; the result counts each of these blocks as
    four, because it takes most of a multiprocessor's resources. num_kv_heads: number of KV heads of the layer."""
    return num_kv_heads if shape.latent is None else 4 * -(-shape.num_heads // LATENT_HEADS)


def _expert_bytes(shape: ModelShape, item: int) -> int:
    """Returns the bytes that the experts of one layer take for each token of a step; 0 without experts. The router's choice does
    not matter, because each token passes through the same number of experts. item: bytes of an element of the model's dtype."""
    experts = shape.experts
    if experts is None:
        return 0
    # for each expert of a token: the outputs of gate and up, and of down; its number, weight and place
    grouped = experts.num_chosen * ((experts.intermediate_size + shape.hidden_size) * item + 12)
    shared = 3 * experts.shared_size * item + shape.hidden_size * item
    scores = (experts.num_experts + 1) * item
    if experts.sigmoid is not None:  # scores in float32, as is the router's input
        scores = (experts.num_experts + shape.hidden_size) * 4
    return grouped + shared + shape.hidden_size * item + scores
