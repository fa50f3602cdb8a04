"""What a weight format says of itself: who asks for it, how it lays out matrices, which kernels it needs, where it can be run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from loader.architectures.architecture import TensorGroup

ALIGN_BYTES = 64


class WeightSlot(NamedTuple):
    """One parameter's place. name: as in the checkpoint; offset_bytes: in the model's weight range. scales_at_bytes: where the
    scales of an int8 matrix are, one float32 for each row; -1: it is held in the model's dtype. stage: when a forward pass first
    needs it, 0 before the layers, n + 1 in layer n, the highest after them."""

    name: str
    shape: tuple[int, ...]
    offset_bytes: int
    num_bytes: int
    scales_at_bytes: int = -1
    stage: int = 0


class Space(NamedTuple):
    """Where a group of tensors goes. offset_bytes: the first free byte of the weight range; item_bytes: an element of the model's
    dtype; block_offset: how far after a block's boundary the group begins in its file, -1 where that does not matter; stage: see
    WeightSlot."""

    offset_bytes: int
    item_bytes: int
    block_offset: int
    stage: int


@dataclass(slots=True, frozen=True)
class WeightFormat:
    """One way to hold the matrices of layers; everything else of a model is plain.

    name: in messages and logs. settings: values of the setting `quantize` that ask for it. place: lays out one group, and returns
    its slots and the first free byte after them. kernels: which set of engine/cpu/kernels/wanted.py it needs beside those of its
    dtype; "": none. widened_bytes: how much of a matrix a step holds in the model's dtype at a time. runs_on_gpus, runs_encoders:
    whether that is built.
    """

    name: str
    settings: tuple[str | None, ...]
    place: Callable[[TensorGroup, Space], tuple[list[WeightSlot], int]]
    kernels: str = ""
    widened_bytes: int = 0
    runs_on_gpus: bool = True
    runs_encoders: bool = True


def aligned(offset_bytes: int) -> int:
    return -(-offset_bytes // ALIGN_BYTES) * ALIGN_BYTES
