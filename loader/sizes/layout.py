"""Computes where each parameter of a model lies in its weight range, and how many bytes that range has.

Parameters that one matrix multiplication reads together (q, k and v; gate and up) lie end to end, so that the fused matrix is a
view of memory and the checkpoint need not be converted. Matrices of layers are held in the model's weight format (loader/formats),
and so are embedding and head if the format is lossless. All other parameters (norms, biases) are plain.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from functools import lru_cache

from loader.architectures import eagle
from loader.architectures.architecture import TensorGroup
from loader.architectures.decoder import Decoder
from loader.architectures.registry import architecture_of
from loader.architectures.wrapper import Wrapper
from loader.errors import CheckpointError
from loader.files.direct_io import BLOCK_BYTES
from loader.files.safetensors import TensorRef
from loader.formats.alignment import aligned
from loader.formats.mxfp4 import is_stack
from loader.formats.plain import PLAIN
from loader.formats.registry import stored_format
from loader.formats.weight_format import (
    FLOATS,
    MIN_BLOCK_ALIGNED_BYTES,
    Space,
    StoredTensor,
    WeightFormat,
    WeightSlot,
)
from loader.shapes.dtypes import DTYPE_OF, ITEM_BYTES
from loader.shapes.expert_copies import any_copies
from loader.shapes.model_shape import Division, ModelShape
from loader.sizes.slices import block_offsets_of_share, format_of, groups_of_share, num_readers, split, whole

# To be raised when the bytes that a load writes to a slot change, for example by another rounding of int8; not when slots change.
CONTENT_VERSION = 1


def as_stored(shape: ModelShape, names: Collection[str]) -> ModelShape:
    """Returns the shape adapted to a checkpoint whose tensors have these names, since checkpoints of one family may name or stack
    the same tensors differently."""
    return architecture_of(shape).as_stored(shape, names)


def predicting(shape: ModelShape, names: Collection[str] | None) -> ModelShape | None:
    """Returns the shape with the model's predictor, the layer that predicts one token further (loader/architectures/predictor.py),
    if the checkpoint holds one that can draft tokens; otherwise None. names: names of the checkpoint's tensors; None: they are not
    known, and config.json decides."""
    family = architecture_of(shape)
    return family.predicting(shape, names) if isinstance(family, Decoder | Wrapper) else None


def parameter_shapes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Returns name -> shape of every parameter, as if the checkpoint stored it plain. For a device's share of a split model, only
    the parameters of the share are listed, with the shapes of the share's parts."""
    return dict(item for _, group in _groups(shape) for item in group.tensors)


@lru_cache(maxsize=4096)
def num_parameters(shape: ModelShape) -> int:
    return sum(map(math.prod, parameter_shapes(shape).values()))


def stored_tensors(shape: ModelShape) -> list[StoredTensor]:
    """Returns every tensor that the checkpoint must contain. They are those of the whole model, even if `shape` is that of a
    device's share."""
    own, shape = stored_format(shape), whole(shape)
    return [tensor for at, group in _groups(shape) for tensor in format_of(shape, at, group, own).stored(group)]


def plain_groups(shape: ModelShape, tensors: Iterable[TensorRef]) -> frozenset[int]:
    """Returns the indices of the tensor groups (matrices that are read together) that a quantised checkpoint stores unquantised
    (ModelShape.plain_groups). tensors: the checkpoint's tensors, from the files' headers. Raises CheckpointError if only some
    tensors of a group are quantised."""
    if not shape.stored_format:
        return frozenset()
    stored, own = {tensor.name: tensor for tensor in tensors}, stored_format(shape)
    found = set()
    for at, group in _groups(shape):
        if not group.may_be_quantized:
            continue
        members = [stored[name] for name, _ in group.tensors if name in stored]
        plain = [tensor for tensor in members if tensor.dtype in FLOATS]
        names = [tensor.name for tensor in plain]
        other = ""
        if plain and len(plain) < len(group.tensors):
            other = next((one.name for one in own.stored(group) if one.name in stored and one.name not in names), "")
        if other:
            why = f"is stored as {plain[0].dtype}, and {other}, which is read together with it, is quantised: not served"
            raise CheckpointError(plain[0].file, plain[0].name, why)
        if plain and is_stack(group):  # its order differs from the one that the model reads
            raise CheckpointError(plain[0].file, plain[0].name, f"is stored as {plain[0].dtype}: served are experts in MXFP4")
        if plain:
            found.add(at)
    return frozenset(found)


def plain_groups_by_name(shape: ModelShape, names: Collection[str]) -> frozenset[int]:
    """Returns the indices of the tensor groups that a quantised checkpoint stores unquantised (ModelShape.plain_groups), according
    to the names of its tensors. A group is unquantised if the checkpoint has none of the tensors that the quantised format adds to
    a matrix, such as scales. names: the names of all tensors."""
    if not shape.stored_format:
        return frozenset()
    own, found = stored_format(shape), set()
    for at, group in _groups(shape):
        plain = {name for name, _ in group.tensors}
        if group.may_be_quantized and not any(tensor.name in names for tensor in own.stored(group) if tensor.name not in plain):
            found.add(at)
    return frozenset(found)


def plain_groups_of_modules(shape: ModelShape, is_plain: Callable[[str], bool]) -> frozenset[int]:
    """Returns the indices of the tensor groups that a quantised checkpoint stores unquantised (ModelShape.plain_groups), according
    to its configuration. is_plain: returns whether the module of a given name is unquantised. Only the first matrix of a group is
    looked up, by its name without ".weight", since all matrices of a group are stored alike."""
    found = set()
    for at, group in _groups(shape):
        if group.may_be_quantized and is_plain(group.tensors[0][0].removesuffix(".weight")):
            found.add(at)
    return frozenset(found)


def format_by_name(shape: ModelShape, names: Collection[str]) -> str:
    """Returns the name of a checkpoint's weight format (ModelShape.stored_format). It is the format of `shape`, which config.json
    gives, or a variant of that format whose scales have other names (WeightFormat.otherwise). config.json is the same for both, so
    the names of the tensors decide. names: the names of the checkpoint's tensors."""
    own = stored_format(shape)
    if own.otherwise and not any(name.endswith(own.scale_suffix) for name in names):
        return own.otherwise
    return shape.stored_format


def is_ignored_tensor(shape: ModelShape, name: str) -> bool:
    """Returns whether a checkpoint may contain the tensor `name` although the model does not need it. Such a tensor is not read."""
    if shape.eagle is not None and name.startswith(eagle.PREFIX):
        return eagle.ignores(name)
    return architecture_of(shape).ignores(shape, name) or stored_format(shape).ignores(name)


def _groups(shape: ModelShape) -> list[tuple[int, TensorGroup]]:
    """Returns the tensor groups of a model, or of a device's share of it, as pairs (index of the group in the whole model,
    group)."""
    if (share := shape.split) is not None:
        of_all = whole(shape)
        return groups_of_share(of_all, architecture_of(of_all).tensor_groups(of_all), share)
    groups = architecture_of(shape).tensor_groups(shape)
    return list(enumerate(groups if shape.eagle is None else groups + eagle.eagle_groups(shape.eagle, shape.num_layers)))


def block_offsets(shape: ModelShape, tensors: Iterable[TensorRef]) -> tuple[int, ...]:
    """Returns, for each tensor group, the offset within a 4 KiB block at which the group begins in its file
    (ModelShape.block_offsets); -1: the group is not to be read directly into the weight range, because it is packed, has another
    dtype, begins at an offset that is no multiple of 8, or is too small. tensors: the checkpoint's tensors, from the files'
    headers."""
    if shape.split is not None:
        of_all = whole(shape)
        return block_offsets_of_share(replace(of_all, block_offsets=block_offsets(of_all, tensors)), shape.split)
    stored, own = {tensor.name: tensor for tensor in tensors if tensor.record is None}, stored_format(shape)
    offsets = []
    for at, group in _groups(shape):
        held_in = format_of(shape, at, group, own)
        held_as = held_in.held_as(group) or group.held_as or shape.dtype
        first = stored.get(next(iter(held_in.stored(group))).name)
        num_bytes = sum(math.prod(dims) for _, dims in group.tensors) * ITEM_BYTES[shape.dtype]
        direct = first is not None and DTYPE_OF.get(first.dtype) == held_as and first.offset_bytes % 8 == 0
        offsets.append(first.offset_bytes % BLOCK_BYTES if first and direct and num_bytes >= MIN_BLOCK_ALIGNED_BYTES else -1)
    return tuple(offsets)


def weight_layout(shape: ModelShape, dtype: str, weight_format: WeightFormat = PLAIN) -> list[WeightSlot]:
    """Returns the location of every parameter in the weight range (WeightSlot). dtype, weight_format: the dtype and format in which
    the weights are held."""
    return _laid_out(shape, dtype, weight_format)[0]


def readers(shape: ModelShape, weight_format: WeightFormat = PLAIN) -> dict[str, int]:
    """Returns, for the parameters of a device's share that several devices of its pipeline stage need, how many devices these are:
    the parameter's name -> their number. These devices can share the reads. Parameters that only one device needs are left out.
    weight_format: the format in which the weights are held."""
    if (share := shape.split) is None:
        return {}
    return {
        tensor.name: number
        for at, group in _groups(shape)
        if (number := num_readers(group, share)) > 1
        for tensor in format_of(shape, at, group, weight_format).stored(group)
    }


def _laid_out(shape: ModelShape, dtype: str, weight_format: WeightFormat) -> tuple[list[WeightSlot], int]:
    """Returns (the locations of all parameters in the weight range, the offset in bytes of the first byte behind the last tensor
    group)."""
    groups = _groups(shape)
    block_offsets = shape.block_offsets if dtype == shape.dtype else ()
    slots: list[WeightSlot] = []
    offset = after_layers = 0
    for (at, group), block_offset in zip(groups, block_offsets or (-1,) * len(groups), strict=True):
        stage = after_layers
        if group.layer is not None:
            stage, after_layers = group.layer + 1, max(after_layers, group.layer + 2)
        held_in = format_of(shape, at, group, weight_format)
        placed, offset = held_in.place(group, Space(offset, ITEM_BYTES[dtype], block_offset, stage, shape.dtype))
        slots += placed
    return slots, offset


@lru_cache(maxsize=4096)
def layout_id(shape: ModelShape, dtype: str, weight_format: WeightFormat = PLAIN) -> str:
    """Returns a digest of the offsets, dtype and format of all parameters in the weight range. Weights may outlive the process that
    loaded them; a later process uses them only if its layout has the same digest."""
    slots = weight_layout(shape, dtype, weight_format)
    return hashlib.sha256(repr((CONTENT_VERSION, dtype, weight_format.name, slots)).encode()).hexdigest()[:32]


@lru_cache(maxsize=4096)
def weights_bytes(shape: ModelShape, dtype: str, weight_format: WeightFormat = PLAIN) -> int:
    """Returns how many bytes the engine maps for the weights in this dtype and format: the length of the longer of two layouts, one
    for direct reads (by `block_offsets`) and one without them."""
    layouts = {replace(shape, block_offsets=()), shape}
    return max(aligned(_laid_out(one, dtype, weight_format)[1]) for one in layouts)


def share_bytes_with_copies(shape: ModelShape, dtype: str, division: Division, weight_format: WeightFormat, num_copies: int) -> int:
    """Returns the most bytes that a device maps for its share of a model's weights if it also holds copies of at most num_copies
    further experts in each layer, whichever experts these are. division: how the model is divided. The result has room for one more
    4 KiB block in each tensor group, because the choice of experts changes at which offset within a block the group begins."""
    with_copies = division._replace(copies=any_copies(shape, division, num_copies))
    plain, firsts = replace(shape, block_offsets=()), range(0, division.size, division.stage_size)
    num_bytes = max(weights_bytes(split(plain, rank, with_copies), dtype, weight_format) for rank in firsts)
    return num_bytes + BLOCK_BYTES * sum(offset >= 0 for offset in shape.block_offsets)


def share_weights_bytes(shape: ModelShape, dtype: str, division: Division, weight_format: WeightFormat = PLAIN) -> int:
    """Returns how many bytes each device maps for its share of a model's weights; if the shares differ, the bytes of the largest
    one. division: how the model is divided. Raises UnsupportedModel for a model that cannot be divided in this way."""
    # A stage's first share has all tensors of the others, which can be longer only by other offsets in the files' blocks, or by
    # copies of experts.
    ranks = range(0, division.size, 1 if shape.block_offsets or division.copies else division.stage_size)
    return max(weights_bytes(split(shape, rank, division), dtype, weight_format) for rank in ranks)
