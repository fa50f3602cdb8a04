"""Defines the weight format of `resident = "packed"`. Loads pack bfloat16 matrices into a lossless form of about 0.72 of their
bytes (loader/formats/packed_rows.py), in which they stay in memory; matrix multiplications decode it as they read it.

Matrices that one matrix multiplication reads together are packed as one. A group of matrices that would not become smaller, such as
one of very short rows, stays plain.
"""

from __future__ import annotations

from loader.architectures.architecture import TensorGroup
from loader.formats.alignment import aligned
from loader.formats.int8 import WIDENED_BYTES
from loader.formats.packed_place import PackedPlace
from loader.formats.plain import PLAIN
from loader.formats.stored_part import matrices_of
from loader.formats.weight_format import Space, WeightFormat, WeightSlot

_ITEM_BYTES = 2  # of bfloat16


def _place(group: TensorGroup, space: Space) -> tuple[list[WeightSlot], int]:
    matrices = list(matrices_of(group))
    if space.item_bytes != _ITEM_BYTES or any(len(dims) != 2 or dims[1] != matrices[0].dims[1] for _, dims, _ in matrices):
        return PLAIN.place(group, space)
    num_outputs, num_inputs = sum(one.dims[0] for one in matrices), matrices[0].dims[1]
    place = PackedPlace(aligned(space.offset_bytes), num_outputs, num_inputs)
    if place.end_bytes - place.begin_bytes >= num_outputs * num_inputs * _ITEM_BYTES:
        return PLAIN.place(group, space)
    slots, offset = [], place.begin_bytes
    for name, dims, cut in matrices:
        num_bytes = dims[0] * place.row_body_bytes
        joint = f"packed with {matrices[0].name}"
        slots.append(WeightSlot(name, dims, offset, num_bytes, stage=space.stage, joint=joint, cut=cut, packed=place))
        offset += num_bytes
    return slots, place.end_bytes


PACKED_IN_MEMORY = WeightFormat(
    "packed",
    (),
    _place,
    resident="packed",
    kernels="packed",
    widened_bytes=WIDENED_BYTES,
    device_kinds=("cpu",),
    runs_encoders=False,
    runs_experts=False,
    waits_for_kernels=True,
)
