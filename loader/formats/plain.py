"""Defines the plain weight format: numbers in the model's dtype. Numbers that are stored in another dtype are converted as they are
read.

The memory of a large group of tensors begins at the same offset within a 4 KiB block as the group does in its file, so that direct
reads can write the group to memory without a copy.
"""

from __future__ import annotations

import math

from loader.architectures.architecture import TensorGroup
from loader.formats.stored_part import matrices_of
from loader.formats.weight_format import Space, WeightFormat, WeightSlot
from loader.shapes.dtypes import ITEM_BYTES


def _place(group: TensorGroup, space: Space) -> tuple[list[WeightSlot], int]:
    offset = space.begin_bytes
    slots, item_bytes = [], ITEM_BYTES[group.held_as] if group.held_as else space.item_bytes
    for name, dims, cut in matrices_of(group):
        num_bytes = math.prod(dims) * item_bytes
        slots.append(WeightSlot(name, dims, offset, num_bytes, stage=space.stage, held_as=group.held_as, cut=cut))
        offset += num_bytes
    return slots, offset


PLAIN = WeightFormat("", (None, "none"), _place)
