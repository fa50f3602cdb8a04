"""Cuts the stored tensors of a matrix when the matrix itself is cut, to give a device its share of a model
(loader/sizes/slices.py).

If a format stores several numbers in a word, or has one scale for several numbers, a matrix can be cut only between such groups of
numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import repeat
from typing import NamedTuple

from loader.architectures.architecture import Cut, Dims, TensorGroup
from loader.errors import CheckpointError


class Along(NamedTuple):
    """The correspondence of one axis of a matrix (outputs or inputs) to an axis of a stored tensor. axis: the index of the axis in
    the stored tensor. num: how many outputs or inputs of the matrix one element along this axis stands for, for example those in a
    word, or those that share a scale."""

    axis: int
    num: int = 1


# for each axis of a matrix, where it lies in a stored tensor; None: the tensor is the same whatever part of that axis is taken
Axes = tuple[Along | None, ...]

EACH_OUTPUT: Axes = (Along(0), None)


class Matrix(NamedTuple):
    """A matrix of a tensor group, or a device's part of the matrix. dims: the dimensions of the matrix or, if it is cut, of the
    part. cut: which part of the matrix it is; None: the whole matrix."""

    name: str
    dims: Dims
    cut: Cut | None

    @property
    def whole_dims(self) -> Dims:
        """The dimensions that the matrix has in the checkpoint."""
        return self.dims if self.cut is None else self.cut.whole_of(self.dims)


class StoredPart(NamedTuple):
    """A part of a stored tensor, as a device's share needs it. shape: the part's shape. cut: which part of the tensor it is; None:
    the whole tensor."""

    shape: Dims
    cut: Cut | None

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)


def matrices_of(group: TensorGroup) -> Iterator[Matrix]:
    for (name, dims), cut in zip(group.tensors, group.cuts or repeat(None), strict=False):
        yield Matrix(name, dims, cut)


def stored_part(name: str, shape: Dims, axes: Axes, cut: Cut | None) -> StoredPart:
    """Returns the part of a stored tensor that a device needs for its part of the matrix. name, shape: those of the whole tensor.
    axes: for each axis of the matrix, the axis of the tensor that corresponds to it (Along); None: none does. cut: which part of
    the matrix the device has; None: the whole matrix. Raises CheckpointError for a cut between numbers that are stored in one
    element, or that share a scale."""
    if cut is None:
        return StoredPart(shape, None)
    of_experts = stored_part(name, shape, axes, cut.experts)
    if (along := axes[cut.axis]) is None:
        return of_experts
    for begin, end in cut.ranges:
        is_last = (begin, end) == cut.ranges[-1] and end == cut.whole
        for at in (begin, *(() if is_last else (end,))):
            if at % along.num:
                why = f"cannot be cut at {at} of {cut.whole}, which is no multiple of {along.num}, of which it has one number"
                raise CheckpointError("config.json", name, why)
    ranges = tuple((begin // along.num, -(-end // along.num)) for begin, end in cut.ranges)
    own = Cut(along.axis, ranges, shape[along.axis], of_experts.cut)
    return StoredPart(own.part_of(shape), own)
