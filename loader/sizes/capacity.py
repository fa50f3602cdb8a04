"""Computes how much memory a model takes on given devices, which need not exist on this machine: its weights, its work space (the
memory of a step), its KV, and how many tokens fit.

On several devices the figures are those of the largest share, as it would be loaded (loader/sizes/slices.py). For models that
cannot be divided in this way they are estimates by tensor parallelism: each device holds an equal part of the matrices and of the
KV heads (one KV head if there are fewer heads than devices), and has a work space of its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from loader.errors import CheckpointError
from loader.formats.weight_format import WeightFormat
from loader.shapes.kv_dtypes import kv_dtype_of
from loader.shapes.kv_layout import (
    KVGroupSpec,
    group_chunks,
    has_several_groups,
    kv_bytes_per_token,
    kv_groups,
    kv_reserved_bytes,
)
from loader.shapes.model_shape import Division, ModelShape
from loader.sizes.gpu_sizing import gpu_work_space_bytes
from loader.sizes.layout import num_parameters, share_weights_bytes, weights_bytes
from loader.sizes.slices import split
from loader.sizes.work_space import work_space_bytes


@dataclass(slots=True, frozen=True)
class Devices:
    """A group of equal devices. kind: "cuda" or "cpu". budget_bytes: bytes that models may use on each device. expert_parts: number
    of parts into which the experts of a layer are divided; 1: each device has a slice of every expert. num_stages: number of
    pipeline stages; each has consecutive layers, and all have the same number of devices."""

    kind: str
    num_devices: int
    budget_bytes: int
    expert_parts: int = 1
    num_stages: int = 1

    @property
    def division(self) -> Division:
        return Division(self.num_devices, self.expert_parts, self.num_stages)


@dataclass(slots=True, frozen=True)
class Settings:
    """The settings of a model on which its memory depends.

    dtype: the dtype in which it is computed. weight_format: the format in which weights are held. kv_cache_dtype: the dtype of keys
    and values; "": the model's dtype. max_model_len: most tokens of a sequence. max_sequences: most sequences at a time.
    max_num_batched_tokens: most tokens of a step. block_tokens: tokens of a KV block. chunk_bytes: bytes of a chunk, the unit in
    which memory is given to models."""

    dtype: str
    weight_format: WeightFormat
    kv_cache_dtype: str
    max_model_len: int
    max_sequences: int
    max_num_batched_tokens: int
    block_tokens: int
    chunk_bytes: int


@dataclass(slots=True, frozen=True)
class KVNeed:
    """The memory for KV of the layers of one KV group (layers with the same kind of attention and the same window). kind: "full",
    "window", "chunked", "latent" or "state".

    window_tokens: the tokens of a sequence whose KV the layers keep, without those of the part of a prompt that a step computes; 0:
    all. token_bytes: KV bytes of one token in all these layers.

    state_bytes: for layers that keep states of a sequence, the bytes of one state in all these layers; token_bytes and
    window_tokens are then 0."""

    num_layers: int
    window_tokens: int
    token_bytes: int
    kind: str
    state_bytes: int = 0


@dataclass(slots=True, frozen=True)
class ModelNeed:
    """The parameters and bytes of a whole model. active_parameters: number of parameters by which one token is computed, without
    the experts that a token does not pass through. kv: the memory for KV, one entry for each KV group. sequence_bytes: bytes that
    are reserved for the KV of one sequence of max_model_len tokens."""

    num_parameters: int
    active_parameters: int
    weights_bytes: int
    kv: tuple[KVNeed, ...]
    sequence_bytes: int


@dataclass(slots=True, frozen=True)
class Share:
    """The memory that a model takes on each of `devices`, and the memory that is left there. All bytes are per device.

    free_bytes: bytes left for KV; if negative, the bytes that are missing. kv_token_bytes: KV bytes of one token in the layers with
    full attention. sequence_bytes: bytes that are reserved for the KV of one sequence of max_model_len tokens.

    tokens: length of the longest sequence whose KV fits; None: any length, since no layer has full attention. sequences: how many
    sequences of max_model_len tokens fit at once.

    not_split: why the model cannot be loaded in such shares; "": it can, or there is one device."""

    devices: Devices
    weights_bytes: int
    work_space_bytes: int
    free_bytes: int
    kv_token_bytes: int
    sequence_bytes: int
    tokens: int | None
    sequences: int
    not_split: str

    @property
    def fits(self) -> bool:
        return self.sequences > 0


@dataclass(slots=True, frozen=True)
class PredictorNeed:
    """The parameters and the memory on each device that a model takes in addition if its predictor (a further layer that drafts
    tokens) is loaded. kv_token_bytes: KV bytes of one token. work_space_bytes: bytes of work space."""

    num_parameters: int
    weights_bytes: int
    kv_token_bytes: int
    work_space_bytes: int


def predictor_need(plain: ModelShape, whole: ModelShape, settings: Settings, kind: str) -> PredictorNeed | None:
    """Returns by how much a model's parameters and memory increase if its predictor is loaded; None if it has no predictor. plain:
    the model's shape without the predictor. whole: its shape with the predictor. kind: kind of the devices, "cuda" or "cpu"."""
    if not whole.predicts:
        return None
    kv_dtype = kv_dtype_of(settings.dtype, settings.kv_cache_dtype)
    with_it, without = (
        (
            num_parameters(shape),
            weights_bytes(shape, settings.dtype, settings.weight_format),
            kv_bytes_per_token(shape, kv_dtype),
            _work_space_bytes(shape, settings, kind),
        )
        for shape in (whole, plain)
    )
    return PredictorNeed(*(more - less for more, less in zip(with_it, without, strict=True)))


def model_need(shape: ModelShape, settings: Settings) -> ModelNeed:
    total = num_parameters(shape)
    groups = _groups(shape, settings)
    return ModelNeed(
        num_parameters=total,
        active_parameters=total - _idle_parameters(shape),
        weights_bytes=weights_bytes(shape, settings.dtype, settings.weight_format),
        kv=tuple(map(_kv_need, groups)),
        sequence_bytes=_sequence_bytes(shape, settings),
    )


def _kv_need(group: KVGroupSpec) -> KVNeed:
    if group.snapshot_tokens:
        return KVNeed(len(group.layers), 0, 0, group.kind, group.block_bytes)
    return KVNeed(len(group.layers), group.window_tokens, group.block_bytes // group.block_tokens, group.kind)


def share_of(shape: ModelShape, settings: Settings, devices: Devices) -> Share:
    chunk = settings.chunk_bytes
    not_split = why_not_split(shape, settings, devices)
    if devices.num_devices > 1 and not not_split:
        own = of_step = split(shape, 0, devices.division)
        of_weights = share_weights_bytes(shape, settings.dtype, devices.division, settings.weight_format)
    else:
        own, of_step = _on_each(shape, devices.num_devices), shape
        of_weights = math.ceil(weights_bytes(shape, settings.dtype, settings.weight_format) / devices.num_devices)
    weights = _chunks(of_weights, chunk)
    work_space = _chunks(_work_space_bytes(of_step, settings, devices.kind), chunk)
    free = devices.budget_bytes // chunk * chunk - weights - work_space
    groups, sequence = _groups(own, settings), _sequence_bytes(own, settings)
    token = sum(one.block_bytes // one.block_tokens for one in groups if not one.window_tokens)
    lengths = settings.max_model_len, settings.max_num_batched_tokens
    windows = chunk * (1 + sum(group_chunks(one, *lengths, chunk) for one in groups if one.window_tokens))
    return Share(
        devices=devices,
        weights_bytes=weights,
        work_space_bytes=work_space,
        free_bytes=free,
        kv_token_bytes=token,
        sequence_bytes=sequence,
        tokens=max(0, free - windows) // token if token else None,
        sequences=max(0, free // sequence) if sequence else int(free >= 0),
        not_split=not_split,
    )


def why_not_split(shape: ModelShape, settings: Settings, devices: Devices) -> str:
    """Returns why the model cannot be divided among these devices, as a sentence; "" if it can, or if there is one device."""
    if devices.num_devices == 1:
        return ""
    try:
        share_weights_bytes(shape, settings.dtype, devices.division, settings.weight_format)
    except CheckpointError as error:
        return str(error)
    return ""


def _on_each(shape: ModelShape, num_devices: int) -> ModelShape:
    """Returns a shape for estimating the KV that each device holds if the model is divided equally among num_devices devices. The
    numbers of KV heads, and of heads of the gated delta rule, are divided by num_devices and rounded up; all other sizes are those
    of the whole model."""
    own = replace(shape, num_kv_heads=math.ceil(shape.num_kv_heads / num_devices))
    if (full := shape.full_heads) is not None:
        own = replace(own, full_heads=replace(full, num_kv_heads=math.ceil(full.num_kv_heads / num_devices)))
    if (delta := shape.delta) is None:
        return own
    keys = math.ceil(delta.num_key_heads / num_devices)
    heads = keys * (delta.num_value_heads // delta.num_key_heads)
    return replace(own, delta=replace(delta, num_key_heads=keys, num_value_heads=heads))


def _groups(shape: ModelShape, settings: Settings) -> tuple[KVGroupSpec, ...]:
    if shape.is_encoder:
        return ()
    return kv_groups(shape, kv_dtype_of(settings.dtype, settings.kv_cache_dtype), settings.block_tokens)


def _sequence_bytes(shape: ModelShape, settings: Settings) -> int:
    """Returns the bytes that the scheduler (scheduler/node/ledger.py) reserves, in whole chunks, for the KV of one sequence of
    max_model_len tokens; 0 for encoders."""
    if shape.is_encoder:
        return 0
    kv_dtype, chunk = kv_dtype_of(settings.dtype, settings.kv_cache_dtype), settings.chunk_bytes
    if has_several_groups(shape):
        lengths = settings.max_model_len, settings.block_tokens, settings.max_num_batched_tokens
        return kv_reserved_bytes(shape, kv_dtype, *lengths, chunk) + chunk
    return _chunks(settings.max_model_len * kv_bytes_per_token(shape, kv_dtype), chunk) + chunk


def _work_space_bytes(shape: ModelShape, settings: Settings, kind: str) -> int:
    batch = settings.max_num_batched_tokens, settings.max_sequences
    if kind == "cuda":
        return gpu_work_space_bytes(shape, settings.dtype, *batch)
    return work_space_bytes(shape, settings.dtype, *batch, settings.max_model_len, settings.weight_format)


def _idle_parameters(shape: ModelShape) -> int:
    """Returns the number of parameters of the experts that a token does not pass through, in all layers together; 0 without
    experts."""
    experts = shape.experts
    if experts is None:
        return 0
    each = 3 * experts.intermediate_size * shape.hidden_size
    num_layers = shape.num_computed_layers if shape.eagle is None else shape.num_layers
    return (num_layers - len(experts.dense_layers)) * (experts.num_experts - experts.num_chosen) * each


def _chunks(num_bytes: int, chunk_bytes: int) -> int:
    """Returns num_bytes rounded up to whole chunks, that is, to a multiple of chunk_bytes."""
    return -(-num_bytes // chunk_bytes) * chunk_bytes
