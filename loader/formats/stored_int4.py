"""The weight formats of checkpoints that hold matrices in INT4 with one scale for each so many inputs of an output
(loader/formats/int4_settings.py).

A matrix NAME [N, K] is stored as NAME_packed [N, K / 8] int32, eight weights a word with the first in the lowest four bits, each
plus 8; NAME_scale [N, G]; and NAME_shape [2], its shape, which is not read. Words are little-endian, so a byte is two weights, the
first in its low bits. Words stay as they are stored, and may be read straight into place. Matrices that one product reads together
lie end to end, and their scales follow them in 16 bits: float16 if that is the dtype in config.json, else bfloat16. A scale that
this dtype does not have is refused by its tensor's name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

from loader.architectures.architecture import TensorGroup
from loader.config_fields import Fields
from loader.dtypes import ITEM_BYTES, SCALES_IN
from loader.errors import CheckpointError
from loader.formats.int4_settings import GROUPS, WHOLE_ROW, read
from loader.formats.int8 import WIDENED_BYTES
from loader.formats.refused import Refused
from loader.formats.weight_format import Space, StoredTensor, WeightFormat, WeightSlot, aligned, refuse_stacked_experts
from loader.model_shape import ModelShape

PACKED, SCALE = "_packed", "_scale"
IN_WORD = 8  # weights
STEP = 32  # kernels take so many inputs at a time
_SHAPE, _HELD_AS = "_shape", "int32"
# what a checkpoint may hold for activations and for KV
_UNUSED = (".input_scale", ".input_global_scale", ".output_scale", ".k_scale", ".v_scale")


def _scale(group_inputs: int, name: str, dims: tuple[int, ...]) -> StoredTensor:
    num_outputs, num_inputs = dims
    groups = 1 if group_inputs == WHOLE_ROW else -(-num_inputs // group_inputs)
    return StoredTensor(name + SCALE, (num_outputs, groups), is_scale=True)


def _packed(name: str, dims: tuple[int, ...]) -> StoredTensor:
    return StoredTensor(name + PACKED, (dims[0], -(-dims[1] // IN_WORD)), ("I32",))


def _stored(group_inputs: int, group: TensorGroup) -> list[StoredTensor]:
    found = []
    for name, dims in group.tensors:
        shape = StoredTensor(name + _SHAPE, (2,), ("I64", "I32"))
        found += [_packed(name, dims), _scale(group_inputs, name, dims), shape]
    return found


def _place(group_inputs: int, group: TensorGroup, space: Space) -> tuple[list[WeightSlot], int]:
    """Lays out a group. Raises CheckpointError for a matrix whose rows are not made of whole groups."""
    held_as = SCALES_IN["float16" if space.stored_dtype == "float16" else "bfloat16"]
    offset, step = space.begin_bytes, group_inputs or STEP
    scales_at = aligned(offset + sum(math.prod(dims) // 2 for _, dims in group.tensors))
    slots = []
    for name, dims in group.tensors:
        if dims[1] % step:
            raise CheckpointError("config.json", name, f"has {dims[1]} inputs, no multiple of {step}, which INT4 needs")
        packed, scale, num_bytes = _packed(name, dims), _scale(group_inputs, name, dims), math.prod(dims) // 2
        how = (scales_at, space.stage, _HELD_AS, group_inputs or dims[1])
        slots.append(WeightSlot(packed.name, packed.shape, offset, num_bytes, *how))
        scale_bytes = math.prod(scale.shape) * ITEM_BYTES[held_as]
        slots.append(WeightSlot(scale.name, scale.shape, scales_at, scale_bytes, stage=space.stage, held_as=held_as))
        offset += num_bytes
        scales_at += scale_bytes
    return slots, scales_at


def _recognises(group_inputs: int, config: Mapping[str, Any]) -> bool:
    return read(config) == group_inputs


def _refuses(config: Mapping[str, Any]) -> tuple[str, str] | None:
    found = read(config)
    return found if isinstance(found, Refused) else None


def _check(group_inputs: int, fields: Fields, shape: ModelShape) -> None:
    """Raises UnsupportedModel for a model whose widths are not made of whole groups."""
    refuse_stacked_experts(fields, shape)
    inner = shape.intermediate_size if shape.experts is None else shape.experts.intermediate_size
    for key, width in (("hidden_size", shape.hidden_size), ("intermediate_size", inner)):
        if width % (group_inputs or STEP):
            raise fields.unsupported(key, f"{width} is no multiple of {group_inputs or STEP}, which INT4 needs")


def _format(group_inputs: int) -> WeightFormat:
    unit = "an output" if group_inputs == WHOLE_ROW else f"a group of {group_inputs} inputs"
    return WeightFormat(
        f"int4 by {group_inputs or 'output'}",
        (),
        partial(_place, group_inputs),
        stored=partial(_stored, group_inputs),
        recognises=partial(_recognises, group_inputs),
        title=f"compressed-tensors' pack-quantized with 4 bits and one symmetric scale {unit}",
        refuses=_refuses,
        ignores=lambda name: name.endswith(_UNUSED),
        kernels="int4",
        widened_bytes=WIDENED_BYTES,
        runs_encoders=False,
        check=partial(_check, group_inputs),
        held_as=lambda group: _HELD_AS,
    )


STORED_INT4 = tuple(_format(group_inputs) for group_inputs in (*GROUPS, WHOLE_ROW))
