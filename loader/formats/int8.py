"""Defines the weight format of `quantize = "int8"`: matrices are rounded to int8 as they are read, with one float32 scale for each
output. Matrices that one matrix multiplication reads together lie end to end, and their scales follow them.

In a split model each device rounds its own share of a matrix. If the inputs are divided, a scale is that of the device's inputs
only. Experts that the checkpoint holds in one tensor are refused, because in some families the rows of such a tensor are inputs,
while a scale is for an output.

loader/formats/int8_rows.py rounds the matrices. The kernels (engine/cpu/kernels) multiply the int8 values directly, or convert a
part of the matrix at a time.
"""

from __future__ import annotations

import math

from loader.architectures.architecture import TensorGroup
from loader.formats.alignment import aligned
from loader.formats.stored_part import matrices_of
from loader.formats.weight_format import SCALE_BYTES, Space, WeightFormat, WeightSlot

WIDENED_BYTES = 4 << 20


def place(group: TensorGroup, space: Space) -> tuple[list[WeightSlot], int]:
    offset = aligned(space.offset_bytes)
    scales_at = aligned(offset + sum(math.prod(dims) for _, dims in group.tensors))
    slots = []
    for name, dims, cut in matrices_of(group):
        num_values = math.prod(dims)
        slots.append(WeightSlot(name, dims, offset, num_values, scales_at, space.stage, cut=cut))
        offset += num_values
        scales_at += dims[0] * SCALE_BYTES
    return slots, scales_at


INT8 = WeightFormat(
    "int8",
    ("int8",),
    place,
    kernels="int8",
    expert_kernels="int8_experts",
    widened_bytes=WIDENED_BYTES,
    runs_encoders=False,
    runs_stacks=False,
)
