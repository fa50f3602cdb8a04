"""Defines the interface that one kind of device offers to the code that loads models. engine/cpu/backend.py and
engine/cuda/backend.py implement it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from engine.contracts.loads import KernelNews
from engine.contracts.steps import HostedEncoder, HostedModel, SplitModel, StreamedModel
from engine.memory.chunk_memory import ChunkMemory
from engine.memory.group_region import GroupRegion
from engine.memory.weight_range import WeightRange
from engine.protocol import Configure, LoadModel, WeightsHeld
from loader.formats.weight_format import WeightFormat
from loader.reading.sinks import WeightSink
from loader.reading.unpack import Decoder
from loader.shapes.model_shape import ModelShape

if TYPE_CHECKING:  # engines of null models do not need torch
    from torch import Tensor


class Backend(Protocol):
    """One device, for the code that loads models: gives access to the device's memory, compiles its kernels and makes models on
    it."""

    @property
    def memory(self) -> ChunkMemory: ...

    @property
    def compute_threads(self) -> int:
        """The number of host threads that compute the steps of a large model; 1 if the device computes steps instead of the
        host."""
        ...

    @property
    def reads_in_place(self) -> bool:
        """Returns whether files can be read straight into the weights' memory."""
        ...

    @property
    def steps_may_overlap(self) -> bool:
        """Returns whether a model's first step may run in a thread of its own while steps of other models run."""
        ...

    def prepare(self, tell: Callable[[KernelNews], None]) -> None:
        """Makes the backend ready for loads: imports its kernels, and may begin to compile those that are not compiled yet. Called
        in a background thread, once, and again if it raised; all other methods are called after it has returned. tell: called, from
        any thread, with news about the compilation of kernels."""
        ...

    def need_kernels(
        self, spec: LoadModel, shape: ModelShape, weight_format: WeightFormat
    ) -> Callable[[Callable[[], None]], None] | None:
        """Requests the kernels that a model's steps need, without waiting until they are compiled. Returns None if the model's load
        need not wait for them. Otherwise returns a function that waits for the kernels and returns once they are compiled. The
        caller calls this function, in any thread, before it calls `model` or `split_model`.

        The returned function has one parameter, `waiting`: a function that it calls while it waits, about every second or more
        often. An error that `waiting` raises ends the wait and is raised again."""
        ...

    def check(self, spec: LoadModel, shape: ModelShape, weight_format: WeightFormat) -> None:
        """Raises UnsupportedModel if the device cannot serve this model with these settings."""
        ...

    def early_model(self, spec: LoadModel, shape: ModelShape, weights: WeightRange) -> StreamedModel | None:
        """Returns the model before its weights have arrived in `weights`, so that its first step can run while they arrive. Returns
        None if the device cannot do that for this model; `model` is then called once the weights have arrived."""
        ...

    def model(self, spec: LoadModel, shape: ModelShape, weights: WeightRange) -> HostedModel | HostedEncoder:
        """Returns the model that computes with `weights`, all of which have arrived. spec: the model's settings. shape: its
        architecture's sizes."""
        ...

    def sink(self, weights: WeightRange) -> WeightSink:
        """Returns the sink through which a load writes a model's weights to the address range `weights`, to which memory is mapped
        already."""
        ...

    def decoder(self) -> Decoder:
        """Returns the decoder that unpacks the weights of packed files on the host."""
        ...

    def measured_decoder(self) -> Decoder:
        """Returns a decoder for measuring how fast packed weights can be decoded. It decodes where loads to this device do: on the
        host or on the device."""
        ...


@runtime_checkable
class SplitsModels(Protocol):
    """A Backend for devices among which a model may be divided."""

    def split_model(
        self, spec: LoadModel, shape: ModelShape, weights: WeightRange, kv_memory: Tensor, region: GroupRegion
    ) -> SplitModel:
        """Returns this device's share of a split model; all its weights have arrived in `weights`. kv_memory: uint8, the memory of
        the share's KV blocks, from block 0 on. region: the shared memory of the engines that hold the model's shares. May wait
        until all shares have been loaded. Raises GroupBroken if a device of the split model is lost meanwhile."""
        ...


@dataclass(slots=True, frozen=True)
class OpenDevice:
    """A device that an engine has opened.
    backend: makes models on the device.
    configure: the engine's settings; num_chunks and work_space_bytes may have been changed to fit the device.
    left: the weights that an earlier engine left in the device's memory, [] if it left none; None: the device's memory ends with
    this process, so no engine finds weights there."""

    backend: Backend
    configure: Configure
    left: list[WeightsHeld] | None
