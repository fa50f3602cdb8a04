"""Divides a decoder among devices: by layers into pipeline stages, and within each stage by tensor parallelism, as in Megatron-LM
(https://arxiv.org/abs/1909.08053).

A stage has consecutive layers; the first stage also has the embedding, and the last one the final norm and the head. Tensors from
which the per-layer inputs of layers are computed are divided by layers (TensorGroup.by_layer).

Each device of a stage has equal parts of the attention heads, of each MLP's inner dimensions and of the rows of embedding and head.
A family's list of tensors says how each group is divided (TensorGroup.divided). Norms and routers are whole on each device. Biases
of outputs that the devices add up are only on the first device. Each device has either some of the routed experts whole, or an
equal part of each of some of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache

from loader.architectures.architecture import COLUMNS, FIRST_ALONE, ROWS, Cut, Dims, TensorGroup
from loader.architectures.registry import architecture_of
from loader.configs.adapter_matrices import decoder_of
from loader.configs.hf_config import CONFIG_NAME
from loader.errors import CheckpointError, UnsupportedModel
from loader.files.direct_io import BLOCK_BYTES
from loader.formats.plain import PLAIN
from loader.formats.registry import stored_format
from loader.formats.weight_format import MIN_BLOCK_ALIGNED_BYTES, Space, WeightFormat
from loader.shapes.dtypes import ITEM_BYTES
from loader.shapes.expert_copies import refused_copies
from loader.shapes.model_shape import Division, ExpertShape, ModelShape, SplitShape

SETTING = "parallel"  # the setting that asks for a division


def split(shape: ModelShape, rank: int, division: Division) -> ModelShape:
    """Returns the shape of one device's share of a model. rank: the device's index. division: how the model is divided. Raises
    UnsupportedModel for a model that cannot be divided in this way, and ValueError for a rank that is negative or not below
    division.size."""
    if not 0 <= rank < division.size:
        raise ValueError(f"rank {rank} is not below the number of devices {division.size}")
    if why := refusal(shape, division):
        raise _unsupported(why)
    full, size = shape.full_heads, division.stage_size
    share = SplitShape(
        rank % size,
        size,
        shape.num_kv_heads,
        division.expert_parts,
        0 if full is None else full.num_kv_heads,
        division.stage_of(rank),
        stage_ends(shape, division.num_stages) if division.num_stages > 1 else (),
        division.copies,
    )
    own = replace(
        shape,
        num_heads=shape.num_heads // size,
        num_kv_heads=max(1, shape.num_kv_heads // size),
        full_heads=None if full is None else replace(full, num_kv_heads=max(1, full.num_kv_heads // size)),
        intermediate_size=shape.intermediate_size // size if _has_mlps(shape) else shape.intermediate_size,
        reading_intermediate_size=shape.reading_intermediate_size // size,
        delta=None if shape.delta is None else shape.delta.with_key_heads(shape.delta.num_key_heads // size),
        experts=None if shape.experts is None else _share_of_experts(shape.experts, share),
        split=share,
    )
    return replace(own, block_offsets=block_offsets_of_share(shape, share)) if shape.block_offsets else own


def whole(shape: ModelShape) -> ModelShape:
    """Returns the shape of the whole model, without the offsets for direct reads (ModelShape.block_offsets), of which `shape`
    describes a device's share. The shape of a model that is not split is returned unchanged."""
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
        intermediate_size=shape.intermediate_size * share.size if _has_mlps(shape) else shape.intermediate_size,
        reading_intermediate_size=shape.reading_intermediate_size * share.size,
        delta=None if shape.delta is None else shape.delta.with_key_heads(shape.delta.num_key_heads * share.size),
        experts=None if shape.experts is None else _all_experts(shape.experts, share),
        split=None,
        block_offsets=(),
    )


def _has_mlps(shape: ModelShape) -> bool:
    """Returns whether any layer has an MLP of ModelShape.intermediate_size, either in place of experts or beside them."""
    experts = shape.experts
    return experts is None or experts.beside or bool(experts.dense_layers)


def _share_of_experts(experts: ExpertShape, share: SplitShape) -> ExpertShape:
    num_own, division = experts.num_experts // share.expert_parts, share.division
    return replace(
        experts,
        intermediate_size=experts.intermediate_size // division.inner_parts,
        shared_size=experts.shared_size // share.size,
        first_own=share.expert_part * num_own,
        num_own=num_own,
    )


def _all_experts(experts: ExpertShape, share: SplitShape) -> ExpertShape:
    inner = experts.intermediate_size * share.division.inner_parts
    shared = experts.shared_size * share.size
    return replace(experts, intermediate_size=inner, shared_size=shared, first_own=0, num_own=0)


@lru_cache(maxsize=4096)
def refusal(shape: ModelShape, division: Division) -> str:
    """Returns why a model cannot be divided among devices as `division` says, as a sentence; "" if it can."""
    size = division.stage_size
    if shape.split is not None:
        return "it is a share of a model already"
    if why := _refused_stages(shape, division.num_stages):
        return why
    if division.expert_parts > 1 and shape.experts is None:
        return f"expert = {division.expert_parts} divides the experts of a model, and {shape.architecture} has none"
    kind = _unserved_kind(shape)
    if kind:
        return f"{kind} is served on one device alone"
    divided = {
        "num_attention_heads": shape.num_heads,
        decoder_of(shape).intermediate_key: shape.intermediate_size if _has_mlps(shape) else 0,
        "vocab_size": shape.vocab_size,
    }
    if shape.delta is not None:
        divided["linear_num_key_heads"] = shape.delta.num_key_heads
    for key, value in divided.items():
        if value % size:
            return f"{key} {value} is no multiple of {size}, the number of devices"
    if why := _refused_experts(shape, division):
        return why
    numbers = {"num_key_value_heads": shape.num_kv_heads}
    if shape.full_heads is not None:
        numbers["num_global_key_value_heads"] = shape.full_heads.num_kv_heads
    for key, num in numbers.items():
        if num % size and size % num:
            return f"{key} {num} neither divides {size}, the number of devices, nor is it a multiple of it"
    return _refused_cut(shape, division) if shape.stored_format else ""


def _refused_stages(shape: ModelShape, num_stages: int) -> str:
    """Returns why the layers of a model cannot be divided into num_stages pipeline stages; "": they can."""
    if num_stages == 1:
        return ""
    if shape.num_layers < num_stages:
        return f"num_hidden_layers {shape.num_layers} are too few for {num_stages} stages (pipeline)"
    first = shape.first_joined_layer
    if first + 1 < num_stages:
        most = f"{num_stages} stages (pipeline) are more than the {first + 1} that {shape.architecture} can have"
        reading = f"its last layers (num_kv_shared_layers {shape.num_reading_layers}) read the keys and values of layer {first}"
        return f"{most}: {reading} or later ones, and are in one stage with these"
    return ""


@lru_cache(maxsize=4096)
def stage_ends(shape: ModelShape, num_stages: int) -> tuple[int, ...]:
    """Returns, for each pipeline stage of a whole model, the index of its last layer plus 1. The layers are divided so that the
    largest number of weights in a stage is as small as possible. The head counts as a part of the last stage. Tables of which a
    step reads only some rows, such as the embedding, do not count. A layer that reads other layers' keys and values is in the same
    stage as these layers."""
    sizes, behind = [0] * shape.num_layers, 0
    groups = architecture_of(shape).tensor_groups(shape)
    for group in groups[1:] if not shape.tie_word_embeddings else groups:
        number = sum(math.prod(dims) for _, dims in group.tensors)
        if group.by_layer:
            if group.by_layer == ROWS:
                sizes = [size + number // shape.num_layers for size in sizes]
        elif group.layer is None:
            behind += number
        elif group.layer < shape.num_layers:
            sizes[group.layer] += number
    joined = shape.first_joined_layer
    sizes = [*sizes[:joined], sum(sizes[joined:])]
    least, most = 0, sum(sizes) + behind
    while least < most:
        middle = (least + most) // 2
        if _stages_within(sizes, behind, middle, num_stages) is None:
            least = middle + 1
        else:
            most = middle
    ends = _stages_within(sizes, behind, most, num_stages)
    assert ends is not None
    return (*ends[:-1], shape.num_layers)


def _stages_within(sizes: Sequence[int], behind: int, bound: int, num_stages: int) -> tuple[int, ...] | None:
    """Returns a division of layers into num_stages stages in which no stage has more than `bound` weights, and the last stages are
    as full as possible: for each stage the index of its last layer plus 1. None: there is no such division. sizes: number of
    weights of each layer. behind: number of weights that the last stage has in addition to those of its layers."""
    ends, left, room = [len(sizes)], num_stages - 1, bound - behind
    for layer in reversed(range(len(sizes))):
        if layer + 1 < ends[0] and (sizes[layer] > room or layer + 1 == left):
            if not left:
                return None
            ends, left, room = [layer + 1, *ends], left - 1, bound
        room -= sizes[layer]
        if room < 0:
            return None
    return tuple(ends)


def _refused_experts(shape: ModelShape, division: Division) -> str:
    """Returns why the experts of a model cannot be divided as `division` says, as a sentence; "": they can, or there are none."""
    experts, family = shape.experts, decoder_of(shape).experts
    if experts is None or family is None:
        return ""
    if experts.num_experts % division.expert_parts:
        key = "{} (or {})".format(*family.num_keys)
        return f"{key} {experts.num_experts} is no multiple of {division.expert_parts}, the parts of experts"
    if experts.intermediate_size % division.inner_parts:
        own = f"{family.size_key} {experts.intermediate_size}"
        return f"{own} is no multiple of {division.inner_parts}, the number of devices that have the same experts"
    if experts.shared_size % division.stage_size:
        return f"{family.shared_key} {experts.shared_size} is no multiple of {division.stage_size}, the number of devices"
    return refused_copies(shape, division) if division.copies else ""


def _unserved_kind(shape: ModelShape) -> str:
    """Returns the kind of model that `shape` is, as the subject of a sentence, if models of this kind cannot be divided; "": it can
    be divided."""
    kinds = (
        (shape.is_encoder, "an encoder"),
        (bool(shape.pooling), "a decoder that makes vectors"),
        (shape.eagle is not None, "a model with an EAGLE-3 head"),
        (shape.predicts, "a model with a layer that predicts further tokens"),
    )
    return next((kind for holds, kind in kinds if holds), "")


def format_of(shape: ModelShape, at: int, group: TensorGroup, weight_format: WeightFormat) -> WeightFormat:
    """Returns the format in which a group of tensors is held: weight_format, or PLAIN if that format does not hold tensors of this
    kind, or if the checkpoint stores the group plain. at: the group's index in the whole model. In a split model embedding and head
    are plain, because packed matrices are not cut."""
    if group.may_be_packed:
        return weight_format if weight_format.resident and shape.split is None else PLAIN
    return weight_format if group.may_be_quantized and at not in shape.plain_groups else PLAIN


def _refused_cut(shape: ModelShape, division: Division) -> str:
    """Returns why the checkpoint's weight format does not allow the cuts of matrices that a division needs, as a sentence; "": it
    does."""
    own, seen = stored_format(shape), set()
    for at, group in enumerate(architecture_of(shape).tensor_groups(shape)):
        matrices = (group.divided, group.unit, tuple(dims for _, dims in group.tensors), group.may_be_reordered)
        if format_of(shape, at, group, own) == PLAIN or matrices in seen:
            continue
        seen.add(matrices)
        size = division.stage_size
        shares = (SplitShape(rank, size, expert_parts=division.expert_parts) for rank in range(size))
        for part in (part for share in shares for part in share_of([group], share) if part.cuts):
            try:
                own.place(part, Space(0, ITEM_BYTES[shape.dtype], -1, 0, shape.dtype))
            except CheckpointError as error:
                key = _key_of(shape, part, error.tensor or "")
                num_parts = division.inner_parts if group.num_experts else size
                return f"{key} in {num_parts} parts: {own.title}: {error.tensor} {error.message}"
    return ""


def _key_of(shape: ModelShape, part: TensorGroup, stored: str) -> str:
    """Returns, for a message about a matrix that cannot be cut, the key of config.json that gives its number of outputs or inputs,
    and the key's value. part: a device's part of the tensor group that has the matrix. stored: the name of the matrix, or of a
    tensor that belongs to it."""
    matrices = zip(part.tensors, part.cuts, strict=True)
    (name, dims), cut = next(one for one in matrices if stored.startswith(one[0][0].removesuffix("weight")))
    experts = decoder_of(shape).experts
    if experts is not None and "expert" in name:
        return f"{experts.size_key} {cut.whole}"
    if part.unit == 1:
        return f"intermediate_size {cut.whole}"
    of_keys = cut.whole == shape.num_kv_heads * part.unit != shape.num_heads * part.unit
    heads = f"num_key_value_heads {shape.num_kv_heads}" if of_keys else f"num_attention_heads {shape.num_heads}"
    return f"{heads} with {part.unit} {'outputs' if cut.axis == len(dims) - 2 else 'inputs'} each"


def _unsupported(why: str) -> UnsupportedModel:
    return UnsupportedModel(CONFIG_NAME, None, f"{SETTING}: {why}")


def groups_of_share(shape: ModelShape, groups: Sequence[TensorGroup], share: SplitShape) -> list[tuple[int, TensorGroup]]:
    """Returns the parts of a model's tensor groups that a device's share has, as pairs (index of the group in the model, part).
    Groups of which the device has no part are left out. shape: the shape of the whole model. groups: all its groups."""
    before = next(at for at, group in enumerate(groups) if group.layer is not None)  # the embedding's groups come before the layers
    return [
        (at, own)
        for at, group in enumerate(groups)
        if not share.stage_ends or _in_stage(shape, share, group, at < before)
        for own in share_of([_of_own_layers(shape, share, group)], share)
    ]


def _of_own_layers(shape: ModelShape, share: SplitShape, group: TensorGroup) -> TensorGroup:
    """Returns a tensor group with only what the pipeline stage of a share needs of it: if the group is divided by layers
    (TensorGroup.by_layer), the rows or columns of the stage's layers, otherwise the whole group."""
    if not share.stage_ends or group.by_layer not in (ROWS, COLUMNS):
        return group
    axis, own = int(group.by_layer == COLUMNS), share.layers_of(share.stage)
    of_layer = [dims[axis] // shape.num_layers for _, dims in group.tensors]
    cuts = (Cut(axis, ((own.start * each, own.stop * each),), each * shape.num_layers) for each in of_layer)
    return group.in_parts(tuple(cuts))


def _in_stage(shape: ModelShape, share: SplitShape, group: TensorGroup, is_before: bool) -> bool:
    """Returns whether the pipeline stage of a share needs something of a tensor group. is_before: whether the group comes before
    those of the first layer, as the embedding does. The first stage needs such a group, and so does the last stage if the embedding
    is also the head."""
    if group.layer is not None:
        return group.layer in share.layers_of(share.stage)
    if group.by_layer:
        return True
    if is_before and share.is_first_stage:
        return True
    return share.is_last_stage and (not is_before or shape.tie_word_embeddings)


def share_of(groups: Iterable[TensorGroup], share: SplitShape) -> list[TensorGroup]:
    """Returns the parts of some tensor groups that a device's share has. Groups of which the device has no part are left out.
    Pipeline stages are not considered: all groups must be needed by the share's stage."""
    return [_cut(group, share) for group in groups if _has_some(group, share)]


def _has_some(group: TensorGroup, share: SplitShape) -> bool:
    number = share.inner_part if group.num_experts else share.rank
    return number == 0 or group.divided != FIRST_ALONE


def num_readers(group: TensorGroup, share: SplitShape) -> int:
    """Returns how many devices of a pipeline stage need the same bytes of a tensor group, and so can share the reads: all devices
    of the stage or, for experts, those that have the same experts. 1 if only one device has the tensors. group: tensors that each
    of these devices needs whole, or of which it needs a part of every row."""
    if group.divided == FIRST_ALONE:
        return 1
    return share.division.inner_parts if group.num_experts else share.size


def _cut(group: TensorGroup, share: SplitShape) -> TensorGroup:
    number, num_parts = share.rank, share.size
    if group.num_experts:
        number, num_parts = share.inner_part, share.division.inner_parts
        if share.expert_parts > 1:
            group = (_some_of_stack if group.stacked else _own_experts)(group, share)
    if group.divided not in (ROWS, COLUMNS) or num_parts == 1:
        return group
    return _along((0 if group.divided == ROWS else 1) + group.stacked, group, number, num_parts)


def _own_experts(group: TensorGroup, share: SplitShape) -> TensorGroup:
    """Returns a tensor group with only the tensors of the experts that the device with this share has. group: the tensors of all
    experts of a layer, in the experts' order."""
    each = len(group.tensors) // group.num_experts
    own = share.experts_of(share.expert_part, group.layer, group.num_experts)
    return group._replace(tensors=tuple(one for at in own for one in group.tensors[at * each : (at + 1) * each]))


def _some_of_stack(group: TensorGroup, share: SplitShape) -> TensorGroup:
    """Returns a tensor group with only the experts that the device with this share has. group: tensors that have all experts of a
    layer along their first axis."""
    own = share.experts_of(share.expert_part, group.layer, group.num_experts)
    ranges = _met((expert, expert + 1) for expert in own)
    return group.in_parts(tuple(Cut(0, ranges, dims[0]) for _, dims in group.tensors))


def _along(axis: int, group: TensorGroup, number: int, num_parts: int) -> TensorGroup:
    """Returns a part of a tensor group, of which each tensor is cut into num_parts parts along an axis. axis: the axis. number: the
    index of the part. If the group has cuts already, because the device has only some of the experts, both cuts apply."""
    joined = group.joined or [(dims[axis],) for _, dims in group.tensors]
    kinds = [(dims, lengths) for (_, dims), lengths in zip(group.tensors, joined, strict=True)]  # few, of many experts' tensors
    cut_of = {kind: _cut_of(kind[0], axis, kind[1], group.unit, number, num_parts) for kind in set(kinds)}
    experts = group.cuts or (None,) * len(kinds)
    return group.in_parts(tuple(cut_of[kind]._replace(experts=own) for kind, own in zip(kinds, experts, strict=True)))


def _cut_of(dims: Dims, axis: int, lengths: Dims, unit: int, number: int, num_parts: int) -> Cut:
    """Returns the cut by which a device gets one of num_parts parts of a tensor along an axis. number: the index of the part. dims:
    the tensor's shape. lengths: the lengths, along the axis, of the matrices of which the tensor consists; each of them is divided.
    unit: number of rows or columns that stay together; if there are fewer units than parts, several parts have the same unit."""
    ranges: list[tuple[int, int]] = []
    first = 0
    for length in lengths:
        num_units = length // unit
        begin, num_own = number * num_units // num_parts, max(1, num_units // num_parts)
        ranges.append((first + begin * unit, first + (begin + num_own) * unit))
        first += length
    return Cut(axis, _met(ranges), dims[axis])


def _met(ranges: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Returns ranges with those that touch merged into one. ranges: in ascending order."""
    found: list[tuple[int, int]] = []
    for begin, end in ranges:
        if found and found[-1][1] == begin:
            begin = found.pop()[0]
        found.append((begin, end))
    return tuple(found)


def block_offsets_of_share(shape: ModelShape, share: SplitShape) -> tuple[int, ...]:
    """Returns, for each tensor group of a device's share, the offset within a 4 KiB block at which it begins in its file
    (ModelShape.block_offsets); -1: it is not read directly, for example because the share has only some of its columns. shape:
    shape of the whole model, with its own block_offsets set."""
    groups, own = architecture_of(shape).tensor_groups(shape), stored_format(shape)
    return tuple(
        _block_offset(groups[at], part, shape.block_offsets[at], format_of(shape, at, groups[at], own), shape.dtype)
        for at, part in groups_of_share(shape, groups, share)
    )


def _block_offset(group: TensorGroup, own: TensorGroup, of_whole: int, held_in: WeightFormat, dtype: str) -> int:
    """Returns the offset within a 4 KiB block at which a device's share of a tensor group begins in its file; -1: a direct read is
    not possible or not worth it. group: the tensor group of the whole model. own: the device's share of the group. of_whole: the
    offset for the whole group; -1: no direct read. held_in, dtype: the weight format and the dtype in which both are held."""
    if of_whole < 0 or own == group:
        return of_whole
    wholes, slots = (held_in.place(one, Space(0, ITEM_BYTES[dtype], -1, 0, dtype))[0] for one in (group, own))
    first = slots[0]
    skipped_bytes = next(slot.offset_bytes for slot in wholes if slot.name == first.name)
    if first.cut is not None:
        skipped_bytes += first.cut.ranges[0][0] * first.num_bytes // first.shape[0]
    is_direct = (first.cut is None or first.cut.axis == 0) and skipped_bytes % 8 == 0
    num_bytes = sum(slot.num_bytes for slot in slots)
    return (of_whole + skipped_bytes) % BLOCK_BYTES if is_direct and num_bytes >= MIN_BLOCK_ALIGNED_BYTES else -1
