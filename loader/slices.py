"""Divides a decoder among the devices of a group: tensor parallelism, as in Megatron-LM (https://arxiv.org/abs/1909.08053).

Each device has equal parts of the heads, of each MLP's inner dimensions and of the head's rows; what a group of tensors is divided
by is said where a family lists it (TensorGroup.divided). Norms and the embedding are whole on each device, and the biases of what
the devices add up are on the first one alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from loader.architectures.architecture import COLUMNS, FIRST_ALONE, ROWS, Cut, Dims, TensorGroup
from loader.architectures.registry import architecture_of
from loader.direct_io import BLOCK_BYTES
from loader.dtypes import ITEM_BYTES
from loader.errors import UnsupportedModel
from loader.formats.plain import PLAIN
from loader.formats.registry import FORMATS
from loader.formats.weight_format import MIN_BLOCK_ALIGNED_BYTES, WeightFormat
from loader.hf_config import CONFIG_NAME
from loader.model_shape import Division, ModelShape, SplitShape
from loader.safetensors import Header

SETTING = "parallel"  # what asks for it


def split(shape: ModelShape, rank: int, division: Division) -> ModelShape:
    """Returns the shape of one share of a model: what device number `rank` of a division holds. Raises UnsupportedModel for a model
    that cannot be divided so."""
    size = division.size
    if not 0 <= rank < size:
        raise ValueError(f"rank {rank} is not below the number of devices {size}")
    if why := refusal(shape, division):
        raise _unsupported(why)
    full = shape.full_heads
    share = SplitShape(rank, size, shape.num_kv_heads, division.expert_parts, 0 if full is None else full.num_kv_heads)
    own = replace(
        shape,
        num_heads=shape.num_heads // size,
        num_kv_heads=max(1, shape.num_kv_heads // size),
        full_heads=None if full is None else replace(full, num_kv_heads=max(1, full.num_kv_heads // size)),
        intermediate_size=shape.intermediate_size // size,
        reading_intermediate_size=shape.reading_intermediate_size // size,
        delta=None if shape.delta is None else shape.delta.with_key_heads(shape.delta.num_key_heads // size),
        split=share,
    )
    return replace(own, block_offsets=block_offsets_of_share(shape, share)) if shape.block_offsets else own


def whole(shape: ModelShape) -> ModelShape:
    """Returns the shape of the whole model, without block offsets if it was split."""
    if (share := shape.split) is None:
        return shape
    full = shape.full_heads
    if full is not None:
        full = replace(full, num_kv_heads=share.num_full_kv_heads or full.num_kv_heads * share.size)
    return replace(
        shape,
        num_heads=shape.num_heads * share.size,
        num_kv_heads=share.num_kv_heads or shape.num_kv_heads * share.size,
        full_heads=full,
        intermediate_size=shape.intermediate_size * share.size,
        reading_intermediate_size=shape.reading_intermediate_size * share.size,
        delta=None if shape.delta is None else shape.delta.with_key_heads(shape.delta.num_key_heads * share.size),
        split=None,
        block_offsets=(),
    )


def refusal(shape: ModelShape, division: Division) -> str:
    """Returns why a model cannot be divided so among devices; "": it can."""
    size = division.size
    if shape.split is not None:
        return "it is a share of a model already"
    if division.expert_parts > 1 and shape.experts is None:
        return f"expert = {division.expert_parts} divides the experts of a model, and {shape.architecture} has none"
    kind = _unserved_kind(shape)
    if kind:
        return f"{kind} is served on one device alone"
    divided = {
        "num_attention_heads": shape.num_heads,
        "intermediate_size": shape.intermediate_size,
        "vocab_size": shape.vocab_size,
    }
    if shape.delta is not None:
        divided["linear_num_key_heads"] = shape.delta.num_key_heads
    for key, value in divided.items():
        if value % size:
            return f"{key} {value} is no multiple of {size}, the number of devices"
    numbers = {"num_key_value_heads": shape.num_kv_heads}
    if shape.full_heads is not None:
        numbers["num_global_key_value_heads"] = shape.full_heads.num_kv_heads
    for key, num in numbers.items():
        if num % size and size % num:
            return f"{key} {num} neither divides {size}, the number of devices, nor is it a multiple of it"
    return ""


def _unserved_kind(shape: ModelShape) -> str:
    """Returns what of a model is not divided, as the subject of a sentence; "": nothing."""
    kinds = (
        (shape.is_encoder, "an encoder"),
        (bool(shape.pooling), "a decoder that makes vectors"),
        (shape.experts is not None and len(shape.experts.dense_layers) < shape.num_layers, "a mixture of experts"),
        (shape.eagle is not None, "a model with an EAGLE-3 head"),
        (shape.predicts, "a model with a layer that predicts further tokens"),
        (bool(shape.stored_format), f"a checkpoint in {FORMATS[shape.stored_format].title or shape.stored_format}"),
    )
    return next((kind for holds, kind in kinds if holds), "")


def check_format(shape: ModelShape, weight_format: WeightFormat) -> None:
    """Raises UnsupportedModel for a share of a model that is to be held in another format than the plain one."""
    if shape.split is not None and weight_format != PLAIN:
        raise _unsupported(f"quantize = {weight_format.name!r} is served on one device alone")


def check_packed(shape: ModelShape, file: str, header: Header) -> None:
    """Raises UnsupportedModel for a share of a model whose file holds packed weights: a frame has rows of several shares."""
    if shape.split is not None and header.source is not None:
        raise _unsupported(f"{file} holds packed weights; shares of a model are read from plain files")


def _unsupported(why: str) -> UnsupportedModel:
    return UnsupportedModel(CONFIG_NAME, None, f"{SETTING}: {why}")


def share_of(groups: Iterable[TensorGroup], share: SplitShape) -> list[TensorGroup]:
    """Returns a device's share of the groups of a whole model. Groups that it has nothing of are left out."""
    return [_cut(group, share) for group in groups if _has_some(group, share)]


def _has_some(group: TensorGroup, share: SplitShape) -> bool:
    return share.rank == 0 or group.divided != FIRST_ALONE


def _cut(group: TensorGroup, share: SplitShape) -> TensorGroup:
    if group.divided not in (ROWS, COLUMNS):
        return group
    axis = 0 if group.divided == ROWS else 1
    joined = group.joined or [(dims[axis],) for _, dims in group.tensors]
    matrices = zip(group.tensors, joined, strict=True)
    cuts = tuple(_cut_of(dims, axis, lengths, group.unit, share) for (_, dims), lengths in matrices)
    tensors = tuple((name, cut.part_of(dims)) for (name, dims), cut in zip(group.tensors, cuts, strict=True))
    return group._replace(tensors=tensors, cuts=cuts)


def _cut_of(dims: Dims, axis: int, lengths: Dims, unit: int, share: SplitShape) -> Cut:
    """Returns a device's part of a tensor. lengths: along the axis, of the matrices that it holds. Where there are fewer units than
    devices, several devices have the same one."""
    ranges: list[tuple[int, int]] = []
    first = 0
    for length in lengths:
        num_units = length // unit
        begin, num_own = share.rank * num_units // share.size, max(1, num_units // share.size)
        ranges.append((first + begin * unit, first + (begin + num_own) * unit))
        first += length
    return Cut(axis, _met(ranges), dims[axis])


def _met(ranges: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Returns ranges in ascending order, with those that meet as one."""
    found: list[tuple[int, int]] = []
    for begin, end in ranges:
        if found and found[-1][1] == begin:
            begin = found.pop()[0]
        found.append((begin, end))
    return tuple(found)


def block_offsets_of_share(shape: ModelShape, share: SplitShape) -> tuple[int, ...]:
    """Returns ModelShape.block_offsets of a device's share. shape: of the whole model, with block offsets. Rows lie in the file as
    they do in memory; columns do not."""
    groups = architecture_of(shape).tensor_groups(shape)
    return tuple(
        _block_offset(_cut(group, share), offset, ITEM_BYTES[group.held_as or shape.dtype])
        for group, offset in zip(groups, shape.block_offsets, strict=True)
        if _has_some(group, share)
    )


def _block_offset(group: TensorGroup, of_whole: int, item_bytes: int) -> int:
    """Returns the distance from a block's boundary at which a share of a group begins in its file, -1 where it does not matter.
    of_whole: that of the whole group."""
    if of_whole < 0 or not group.cuts:
        return of_whole
    cut, (_, dims) = group.cuts[0], group.tensors[0]
    skipped_bytes = cut.ranges[0][0] * math.prod(dims[1:]) * item_bytes
    num_bytes = sum(math.prod(dims) for _, dims in group.tensors) * item_bytes
    is_direct = cut.axis == 0 and skipped_bytes % 8 == 0 and num_bytes >= MIN_BLOCK_ALIGNED_BYTES
    return (of_whole + skipped_bytes) % BLOCK_BYTES if is_direct else -1


def rows_of(num_rows: int, share: SplitShape | None) -> slice:
    """Returns the rows of a head that a device computes logits with. num_rows: of the whole head."""
    if share is None:
        return slice(0, num_rows)
    return slice(share.rank * num_rows // share.size, (share.rank + 1) * num_rows // share.size)
