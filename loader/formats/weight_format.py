"""Describes weight formats: which setting asks for one, how it lays out matrices, which kernels it needs, and where it is
supported.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from loader.architectures.architecture import TensorGroup

ALIGN_BYTES = 64


class WeightSlot(NamedTuple):
    """The place of one parameter. name: as in the checkpoint. offset_bytes: in the model's weight range. scales_at_bytes: where
    the scales of an int8 matrix begin, one float32 for each row; -1: the parameter is held in the model's dtype. stage: the
    part of a forward pass that first needs it: 0 before the layers, n + 1 for layer n, the highest number after the layers."""

    name: str
    shape: tuple[int, ...]
    offset_bytes: int
    num_bytes: int
    scales_at_bytes: int = -1
    stage: int = 0


class Space(NamedTuple):
    """Where the next group of tensors may go. offset_bytes: the first free byte of the weight range. item_bytes: the size of an
    element of the model's dtype. block_offset: the distance from a block's boundary at which the group begins in its file; -1:
    it does not matter. stage: see WeightSlot."""

    offset_bytes: int
    item_bytes: int
    block_offset: int
    stage: int


@dataclass(slots=True, frozen=True)
class WeightFormat:
    """One way to hold the matrices of layers. All other parameters of a model are plain.

    name: used in messages and logs. settings: values of the setting `quantize` that ask for it. place: lays out one group;
    returns its slots and the first free byte after them. kernels: the set of kernels (engine/cpu/kernels/wanted.py) that it needs
    besides those of the dtype; "": none. widened_bytes: how much of a matrix a step holds in the model's dtype at a time.
    runs_on_gpus, runs_encoders: whether GPUs, and encoders, support it."""

    name: str
    settings: tuple[str | None, ...]
    place: Callable[[TensorGroup, Space], tuple[list[WeightSlot], int]]
    kernels: str = ""
    widened_bytes: int = 0
    runs_on_gpus: bool = True
    runs_encoders: bool = True


def aligned(offset_bytes: int) -> int:
    return -(-offset_bytes // ALIGN_BYTES) * ALIGN_BYTES
