"""Defines the weight format of checkpoints whose experts are in MXFP4: four-bit numbers (e2m1), of which each 32 share a scale that
is a power of two. All other matrices of such a checkpoint are plain.

The matrices of all experts of a layer are one tensor NAME [E, N, K]. It is stored as NAME_blocks [E, N, K / 32, 16] uint8, two
numbers a byte with the first in the low four bits, and NAME_scales [E, N, K / 32] uint8, the scales' exponents plus 127 (E8M0).
Both are held as stored, so blocks can be read directly to their offset in memory; kernels convert them as they multiply. A stored
exponent of 255 means NaN and is refused. Source: Open Compute Project, "OCP Microscaling Formats (MX) Specification", version 1.0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from loader.architectures.architecture import TensorGroup
from loader.formats.alignment import aligned
from loader.formats.int8 import WIDENED_BYTES
from loader.formats.plain import PLAIN
from loader.formats.stored_part import Along, matrices_of, stored_part
from loader.formats.weight_format import Space, StoredTensor, WeightFormat, WeightSlot
from loader.shapes.config_fields import Fields
from loader.shapes.dtypes import E8M0
from loader.shapes.model_shape import ALTERNATING, ModelShape

GROUP = 32  # numbers that share a scale
BLOCK_BYTES_OF_GROUP = GROUP // 2
BLOCKS, SCALES = "_blocks", "_scales"
_AXES = (Along(0), Along(1), Along(2, GROUP))  # axes of experts, outputs and inputs
_STORED_AS, _HELD_AS = ("U8",), "uint8"


def _recognises(config: Mapping[str, Any]) -> bool:
    return config.get("quant_method") == "mxfp4"


def _check(fields: Fields, shape: ModelShape) -> None:
    """Raises UnsupportedModel for a model whose experts are not stacked as gpt-oss's are, or whose widths are no multiples of 32,
    the numbers that share a scale."""
    if shape.experts is None or shape.experts.stack != ALTERNATING:
        raise fields.unsupported("quantization_config", f"{shape.architecture} is not served in MXFP4")
    for key, width in (("hidden_size", shape.hidden_size), ("intermediate_size", shape.experts.intermediate_size)):
        if width % GROUP:
            raise fields.unsupported(key, f"{width} is no multiple of {GROUP}, which MXFP4 needs")


def is_stack(group: TensorGroup) -> bool:
    """Returns whether a group of tensors has the matrices of all experts of a layer in one tensor; only these are in MXFP4."""
    return group.may_be_quantized and len(group.tensors[0][1]) == 3


def _parts(name: str, dims: tuple[int, ...]) -> tuple[StoredTensor, StoredTensor]:
    groups = (*dims[:-1], dims[-1] // GROUP)
    blocks = StoredTensor(name + BLOCKS, (*groups, BLOCK_BYTES_OF_GROUP), _STORED_AS)
    return blocks, StoredTensor(name + SCALES, groups, _STORED_AS)


def _stored(group: TensorGroup) -> list[StoredTensor]:
    if not is_stack(group):
        return PLAIN.stored(group)
    return [part for name, dims in group.tensors for part in _parts(name, dims)]


def _place(group: TensorGroup, space: Space) -> tuple[list[WeightSlot], int]:
    if not is_stack(group):
        return PLAIN.place(group, space)
    (matrix,) = matrices_of(group)
    slots, end = list[WeightSlot](), space.begin_bytes
    for tensor, held_as in zip(_parts(matrix.name, matrix.whole_dims), (_HELD_AS, E8M0), strict=True):
        own, begin = stored_part(tensor.name, tensor.shape, _AXES, matrix.cut), aligned(end) if slots else end
        slots.append(WeightSlot(tensor.name, own.shape, begin, own.num_elements, -1, space.stage, held_as, cut=own.cut))
        end = begin + own.num_elements
    return slots, end


MXFP4 = WeightFormat(
    "mxfp4",
    (),
    _place,
    stored=_stored,
    recognises=_recognises,
    title="mxfp4 experts of gpt-oss",
    kernels="mxfp4",
    widened_bytes=WIDENED_BYTES,
    runs_encoders=False,
    check=_check,
    held_as=lambda group: _HELD_AS if is_stack(group) else "",
)
