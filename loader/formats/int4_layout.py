"""Lays out INT4 matrices in memory, for checkpoints of all producers. The four-bit weights come first, in the order in which
kernels read them; those of matrices that one matrix multiplication reads together lie end to end. After them come their scales in
16 bits and, if they are held, their zero points in 8 bits and the order of their inputs.

A weight is (number - zero point) times scale, for numbers from 0 to 15. If no zero points are held, they are all 8.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from loader.architectures.architecture import Dims, TensorGroup
from loader.architectures.registry import expert_size_key
from loader.errors import CheckpointError
from loader.formats.alignment import aligned
from loader.formats.relayout import Relayout
from loader.formats.stored_part import Axes, matrices_of, stored_part
from loader.formats.weight_format import Space, StoredTensor, WeightSlot, refuse_stacked_experts
from loader.shapes.config_fields import Fields
from loader.shapes.model_shape import ModelShape

IN_WORD = 8  # weights in a word of 32 bits
STEP = 32  # inputs that kernels process at a time
REARRANGED = "rearranged"  # WeightFormat.held_as of formats whose tensors cannot be read straight into place


class Names(NamedTuple):
    """The names of the tensors in which a producer stores an INT4 matrix, as suffixes that follow the matrix's name without
    `.weight`. words: the four-bit weights. scales, zeros: scales and zero points. order: for each input, the index of the group of
    inputs with which it shares a scale; "": there is no such tensor."""

    words: str
    scales: str
    zeros: str
    order: str = ""

    def of(self, matrix: str, part: str) -> str:
        """Returns the name of the tensor `part` of a matrix. matrix: the matrix's name with `.weight`. part: the tensor's
        suffix."""
        return matrix.removesuffix(".weight") + part


COMPRESSED = Names(".weight_packed", ".weight_scale", ".weight_zero_point")  # names of compressed-tensors
BY_INPUT = Names(".qweight", ".scales", ".qzeros", ".g_idx")  # names of AWQ and GPTQ


class Int4Tensor(NamedTuple):
    """One of the stored tensors of an INT4 matrix. held_as: its dtype in memory. axes: which axes of the tensor correspond to the
    matrix's outputs and inputs. relayout: how its numbers are rearranged; None: they are held in the stored order. item_bytes:
    bytes of an element in memory, if relayout is None."""

    tensor: StoredTensor
    held_as: str
    axes: Axes
    item_bytes: int = 0
    relayout: Relayout | None = None

    def held_bytes(self, shape: Dims) -> int:
        """Returns how many bytes of memory a part of the tensor takes. shape: the part's shape as the checkpoint stores it."""
        return math.prod(shape) * self.item_bytes if self.relayout is None else self.relayout.held_bytes(shape)


class Int4Tensors(NamedTuple):
    """The stored tensors of one INT4 matrix. words: the four-bit weights. zeros: the zero points; None: all are 8. order: for each
    input, the index of the group of inputs with which it shares a scale; None: the checkpoint has no such tensor."""

    words: Int4Tensor
    scales: Int4Tensor
    zeros: Int4Tensor | None = None
    order: Int4Tensor | None = None


def rearranged(tensor: StoredTensor, held_as: str, axes: Axes, relayout: Relayout) -> Int4Tensor:
    return Int4Tensor(tensor, held_as, axes, relayout=relayout)


def place(
    parts_of: Callable[[str, tuple[int, ...]], Int4Tensors], group_inputs: int, is_joint: bool, group: TensorGroup, space: Space
) -> tuple[list[WeightSlot], int]:
    """Lays out a group of INT4 matrices in memory. Returns the slots (WeightSlot) and the offset in bytes of the first free byte
    after them. parts_of(name, dims): returns the tensors of one matrix with the name `name` and the shape `dims`. group: the
    matrices. space: the free space of the weight range. group_inputs: number of inputs that share a scale; 0: all inputs of an
    output share one. is_joint: whether the loader reorders the inputs of the weights, which it does once all matrices of the group
    have been read.

    Raises CheckpointError for a matrix whose number of inputs is no multiple of group_inputs, or whose outputs do not fill whole
    words of zero points. In a split model it raises CheckpointError also for a part of a matrix that begins or ends among inputs
    that share a scale, or within a word, and for a part that has only some of the inputs of a matrix whose inputs are reordered."""
    step = group_inputs or STEP
    slots: list[WeightSlot] = []
    end = space.begin_bytes
    matrices = [(matrix, parts_of(matrix.name, matrix.whole_dims)) for matrix in matrices_of(group)]
    for number in range(len(Int4Tensors._fields)):
        begin = end if not number else aligned(end)
        for matrix, parts in matrices:
            name, dims, cut = matrix
            part: Int4Tensor | None = parts[number]
            if part is None:
                continue
            if dims[1] % step:
                raise CheckpointError("config.json", name, f"has {dims[1]} inputs, no multiple of {step}, which INT4 needs")
            if parts.zeros is not None and dims[0] % IN_WORD:
                raise CheckpointError("config.json", name, f"has {dims[0]} outputs, no multiple of {IN_WORD}, which its words need")
            if is_joint and cut is not None and cut.axis:
                why = f"has its {cut.whole} inputs in an order of its own (desc_act): not divided"
                raise CheckpointError("config.json", name, why)
            joint = group.tensors[0][0] if is_joint and part in (parts.words, parts.order) else ""
            # also for a part, the order is checked over all inputs
            own_inputs = group_inputs or (matrix.whole_dims if part is parts.order else dims)[1]
            if part in (parts.scales, parts.zeros):
                own_inputs = 0
            shape, own_cut = stored_part(part.tensor.name, part.tensor.shape, part.axes, cut)
            num_bytes = part.held_bytes(shape)
            how = (space.stage, part.held_as, own_inputs, 0, part.relayout, joint)
            slots.append(WeightSlot(part.tensor.name, shape, begin, num_bytes, -1, *how, cut=own_cut))
            end = begin = begin + num_bytes
    scales_at = {slot.name: slot.offset_bytes for slot in slots}
    for at, (_, parts) in enumerate(matrices):  # the weights' slots come first
        slots[at] = slots[at]._replace(scales_at_bytes=scales_at[parts.scales.tensor.name])
    return slots, end


def check(group_inputs: int, fields: Fields, shape: ModelShape) -> None:
    """Checks that the widths of a model are multiples of the number of inputs that share a scale. Raises UnsupportedModel if they
    are not. group_inputs: that number; 0: all inputs of an output share a scale, and the widths must be multiples of STEP. fields:
    config.json. The width of MLPs that only some layers have in place of experts is not checked: these may be stored plain, and
    `place` checks them if they are not."""
    refuse_stacked_experts(fields, shape)
    widths = [("hidden_size", shape.hidden_size)]
    if shape.experts is not None:
        widths.append((expert_size_key(shape), shape.experts.intermediate_size))
    if shape.experts is None or shape.experts.beside:
        widths.append(("intermediate_size", shape.intermediate_size))
    if shape.layer_inputs is not None:
        widths.append(("hidden_size_per_layer_input", shape.layer_inputs.width))
    for key, width in widths:
        if width % (group_inputs or STEP):
            raise fields.unsupported(key, f"{width} is no multiple of {group_inputs or STEP}, which INT4 needs")
