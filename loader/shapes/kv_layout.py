"""Computes the KV groups of a model and how much memory its KV takes: the bytes of a token and of a block, and the number of chunks
that a sequence needs. A KV group consists of layers that share block tables; a chunk is the unit in which memory is given to
models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from loader.shapes.dtypes import ITEM_BYTES
from loader.shapes.kv_dtypes import kv_dtype_named
from loader.shapes.model_shape import ModelShape

MIN_MODEL_LEN = 2048
# A prompt saves a state wherever it has passed a multiple of so many tokens. A state of Qwen3-Next 80B takes as much memory as the
# keys and values of 3,072 of its tokens.
SNAPSHOT_TOKENS = 1024
NO_LAYER = -1  # marks an unused place in KVGroupSpec.layers
_FEW_STATES = 8  # states that one sequence holds, with up to 4,096 tokens in a step


@dataclass(slots=True, frozen=True)
class KVGroupSpec:
    """A KV group: layers that share block tables (docs/design/memory.md). block_bytes: the size of one block, for all these layers.

    layers: the layers for which a block has room, by index. Blocks must have the same size in all pipeline stages, so each stage
    has as many places as the stage with the most layers of the group; places without a layer are NO_LAYER.

    kind: which positions a query at position p attends to. "full": [0, p]; window_tokens is 0. "window": [p - window_tokens + 1,
    p]. "chunked": positions are divided into chunks of window_tokens, and a query attends to its own chunk up to p. "latent": as
    "full", but the KV of a token is one vector for all heads (LatentShape). "state": the layers keep a state instead of KV.

    A block of a "state" group holds one state of a sequence in all these layers: the one after the last computed token among the
    block's tokens (scheduler/batch/group_cache.py). snapshot_tokens: a prompt saves a state after each multiple of this number of
    tokens; 0 for groups of other kinds. window_tokens of a "state" group is block_tokens + 1."""

    kind: str  # full, window, chunked, latent, state
    block_tokens: int
    block_bytes: int
    layers: tuple[int, ...]
    window_tokens: int = 0
    snapshot_tokens: int = 0

    @property
    def reach(self) -> int:
        """The window as kernels expect it: window_tokens, where 0 means that a query attends to all earlier tokens; in a chunked
        group -window_tokens."""
        return -self.window_tokens if self.kind == "chunked" else self.window_tokens


def kv_token_dims(shape: ModelShape, layer: int) -> tuple[int, int, int]:
    """Returns the dimensions of one token's KV in a layer: (2 for keys and values, number of KV heads, size of a head in elements).
    With latent attention they are (1, 1, size of a latent and of the keys' dimensions with RoPE together)."""
    if shape.latent is not None and not (shape.eagle is not None and layer == shape.num_layers):
        return 1, 1, shape.latent.token_values
    heads = shape.heads_of(layer)
    return 2, heads.num_kv_heads, heads.head_dim


def group_token_dims(shape: ModelShape, group: KVGroupSpec) -> tuple[int, int, int]:
    """Returns the dimensions of one token's KV in a layer of a KV group, as `kv_token_dims` does; all layers of a group have the
    same. In a pipeline stage without layers of the group, returns those of the group's layers in other stages. For a group of
    states the result has no meaning."""
    layer, windows = group.layers[0], _windows(shape)
    if layer == NO_LAYER:
        layer = next((one for one in shape.attention_layers if windows[one] == group.window_tokens), layer)
    return kv_token_dims(shape, layer)


def kv_bytes_per_token(shape: ModelShape, kv_dtype: str) -> int:
    """Returns the bytes of one token's keys and values in all layers that keep them; 0 for an encoder. kv_dtype: the name of their
    dtype."""
    return 0 if shape.is_encoder else sum(_layer_bytes(shape, layer, kv_dtype) for layer in _counted_layers(shape))


def state_bytes(shape: ModelShape) -> int:
    """Returns the bytes of one state (float32) of a sequence in all layers of the gated delta rule; 0 if the model has no such
    layers."""
    if shape.delta is None:
        return 0
    return len(_places(shape, sorted(shape.delta.layers))) * shape.delta.state_values * ITEM_BYTES["float32"]


def is_bounded(shape: ModelShape) -> bool:
    """Returns whether some layers keep memory of bounded size for a sequence of any length: the KV of a sliding window or of a
    chunk, or the state of the gated delta rule."""
    return any(shape.layer_windows) or shape.delta is not None


def has_several_groups(shape: ModelShape) -> bool:
    """Returns whether the scheduler reserves memory for KV separately for each KV group (layers that share block tables), in whole
    chunks. It does if the model has layers with windows or states, or a head that drafts tokens."""
    return is_bounded(shape) or shape.eagle is not None


def _windows(shape: ModelShape) -> tuple[int, ...]:
    """Returns the window of each layer in tokens; 0: the layer has full attention. One more 0 follows, for the layer that drafts
    tokens, whether or not there is one."""
    return (*(shape.layer_windows or (0,) * shape.num_layers), 0)


def _counted_layers(shape: ModelShape) -> list[int]:
    """Returns the indices of layers whose KV bytes add up to what a device holds for each token. For a whole model these are all
    layers that keep KV. For a pipeline stage they are, for each length of window, as many layers as a KV block has room for
    (`_places`). They need not be the stage's own layers, because all layers with the same window have KV of the same size."""
    windows, counted = _windows(shape), list[int]()
    for window in sorted(set(windows)):
        layers = [layer for layer in shape.attention_layers if windows[layer] == window]
        counted += layers[: len(_places(shape, layers))]
    return counted


def _places(shape: ModelShape, layers: Sequence[int]) -> tuple[int, ...]:
    """Returns the layers of a KV group for which a block on a device has room. layers: all layers of the group. For a whole model
    the result is `layers`. For a pipeline stage it is the stage's own layers among these, followed by as many NO_LAYER as make it
    as long as that of the stage with the most layers of the group."""
    share = shape.split
    if share is None or not share.stage_ends:
        return tuple(layers)
    most = max(sum(layer in share.layers_of(stage) for layer in layers) for stage in range(share.num_stages))
    own = tuple(layer for layer in layers if layer in shape.own_layers)
    return own + (NO_LAYER,) * (most - len(own))


def _layer_bytes(shape: ModelShape, layer: int, kv_dtype: str) -> int:
    """Returns the bytes of one token's keys and values in one layer."""
    num, kv_heads, head_dim = kv_token_dims(shape, layer)
    return num * kv_heads * kv_dtype_named(kv_dtype).head_bytes(head_dim)


def block_bytes(shape: ModelShape, kv_dtype: str, block_tokens: int) -> int:
    """Returns the bytes of a KV block of block_tokens tokens, for a model whose layers form a single KV group (share block
    tables)."""
    return kv_bytes_per_token(shape, kv_dtype) * block_tokens


def kv_groups(shape: ModelShape, kv_dtype: str, block_tokens: int) -> tuple[KVGroupSpec, ...]:
    """Returns the model's KV groups (layers that share block tables) in this order: that of the layers with full attention, one for
    each length of sliding window (ascending), that of the layers that keep states, and that of a head that drafts tokens."""
    windows, with_keys = _windows(shape), shape.attention_layers
    groups = []
    own_layers = with_keys if shape.eagle is None else with_keys[:-1]
    for window in sorted({windows[layer] for layer in own_layers}):
        layers = tuple(layer for layer in own_layers if windows[layer] == window)
        kind = "full" if shape.latent is None else "latent"
        if window:
            kind = "chunked" if shape.chunked_windows else "window"
        places, layer_bytes = _places(shape, layers), _layer_bytes(shape, layers[0], kv_dtype)
        groups.append(KVGroupSpec(kind, block_tokens, layer_bytes * block_tokens * len(places), places, window))
    if shape.delta is not None and shape.delta.layers:
        layers = _places(shape, sorted(shape.delta.layers))
        groups.append(KVGroupSpec("state", block_tokens, state_bytes(shape), layers, block_tokens + 1, SNAPSHOT_TOKENS))
    if shape.eagle is not None:  # its keys are rotated by angles of its own
        layer = shape.num_layers
        groups.append(KVGroupSpec("full", block_tokens, _layer_bytes(shape, layer, kv_dtype) * block_tokens, (layer,)))
    return tuple(groups)


def group_chunks(group: KVGroupSpec, max_model_len: int, max_num_batched_tokens: int, chunk_bytes: int) -> int:
    """Returns how many chunks (units in which memory is given to models) are needed for all blocks that one sequence of
    max_model_len tokens has at a time in a KV group. Room for one more block is included, because blocks do not begin and end where
    chunks do.

    In a group with sliding windows a sequence has blocks for the window and for the part of a prompt that one step computes; in a
    group of states, for the states before that part, within it, and at its end (GroupCache.most_blocks)."""
    blocks = -(-max_model_len // group.block_tokens)
    if group.snapshot_tokens:
        blocks = min(blocks, 4 - (-max_num_batched_tokens // group.snapshot_tokens))
    elif group.window_tokens:
        blocks = min(blocks, -(-(group.window_tokens + max_num_batched_tokens) // group.block_tokens) + 1)
    return -(-blocks * group.block_bytes // chunk_bytes) - (-group.block_bytes // chunk_bytes)


def kv_reserved_bytes(
    shape: ModelShape, kv_dtype: str, max_model_len: int, block_tokens: int, max_num_batched_tokens: int, chunk_bytes: int
) -> int:
    """Returns the bytes that the scheduler reserves, in whole chunks, for the KV of one sequence of max_model_len tokens if each KV
    group has chunks of its own. One chunk fewer is counted, because the scheduler's ledger adds one for every model."""
    groups = kv_groups(shape, kv_dtype, block_tokens)
    return (sum(group_chunks(group, max_model_len, max_num_batched_tokens, chunk_bytes) for group in groups) - 1) * chunk_bytes


def default_max_model_len(shape: ModelShape, kv_dtype: str, device_budget_bytes: int) -> int:
    """Returns the context length in tokens with which a model is served by default. It is the smaller of two numbers: the
    checkpoint's context length, and the number of tokens whose KV fits into a quarter of the device's budget, where fewer than
    2,048 tokens count as 2,048. In this, a layer with a sliding window counts with at most the KV of its window, and a layer of the
    gated delta rule with a fixed number (_FEW_STATES) of states."""
    if shape.is_encoder:
        return shape.max_position_embeddings
    windows = {layer: shape.layer_windows[layer] for layer in _counted_layers(shape) if any(shape.layer_windows)}
    share_bytes = max(0, device_budget_bytes // 4 - _FEW_STATES * state_bytes(shape))
    in_windows = sum(window * _layer_bytes(shape, layer, kv_dtype) for layer, window in windows.items())
    fits = share_bytes // kv_bytes_per_token(shape, kv_dtype)  # shorter than every window
    if windows and fits > max(windows.values()):
        full_bytes = sum(_layer_bytes(shape, layer, kv_dtype) for layer, window in windows.items() if not window)
        fits = max(0, share_bytes - in_windows) // full_bytes if full_bytes else shape.max_position_embeddings
    return min(shape.max_position_embeddings, max(MIN_MODEL_LEN, fits))
