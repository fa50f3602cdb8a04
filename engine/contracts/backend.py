"""Defines the interface between the code that loads models and one kind of device. engine/cpu/backend.py and engine/cuda/backend.py
implement it."""

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
from loader.model_shape import ModelShape
from loader.sinks import WeightSink
from loader.unpack import Decoder

if TYPE_CHECKING:  # engines of null models do not need torch
    from torch import Tensor


class Backend(Protocol):
    """One device: its memory, and the models on it."""

    @property
    def memory(self) -> ChunkMemory: ...

    @property
    def compute_threads(self) -> int:
        """How many threads of the host compute the steps of a large model; 1 if the device computes them itself."""
        ...

    @property
    def reads_in_place(self) -> bool:
        """Whether files can be read straight into the weights' memory."""
        ...

    @property
    def steps_may_overlap(self) -> bool:
        """Whether a model's first step may run in a thread of its own while steps of other models run."""
        ...

    def prepare(self, tell: Callable[[KernelNews], None]) -> None:
        """Finds the kernels and begins to compile those that are missing. Called once, in a background thread; no method below is
        called before it has returned. tell: called from any thread with news about kernels."""
        ...

    def need_kernels(
        self, spec: LoadModel, shape: ModelShape, weight_format: WeightFormat
    ) -> Callable[[Callable[[], None]], None] | None:
        """Asks for the kernels of a model, without waiting. Returns None on a device that serves the model without them, otherwise
        a function that compiles them. That function is called in any thread with a callable `waiting`, which it calls every second;
        an error that `waiting` raises ends the compilation and is passed on. `model` and `split_model` are called only after it has
        returned."""
        ...

    def check(self, spec: LoadModel, shape: ModelShape, weight_format: WeightFormat) -> None:
        """Raises UnsupportedModel if the device cannot serve this model with these settings."""
        ...

    def early_model(self, spec: LoadModel, shape: ModelShape, weights: WeightRange) -> StreamedModel | None:
        """Returns the model before its weights have arrived, so that its first step can run while they arrive. Returns None if the
        device or the model cannot do that; `model` is called later then."""
        ...

    def model(self, spec: LoadModel, shape: ModelShape, weights: WeightRange) -> HostedModel | HostedEncoder:
        """Returns the model once its weights have arrived."""
        ...

    def sink(self, weights: WeightRange) -> WeightSink:
        """Returns the sink that stores a model's weights in its mapped range."""
        ...

    def decoder(self) -> Decoder:
        """Returns the decoder of packed weights on the host."""
        ...

    def measured_decoder(self) -> Decoder:
        """Returns a decoder for measurements: it decodes a frame in the same place as loads do, on the host or on the device."""
        ...


@runtime_checkable
class SplitsModels(Protocol):
    """A Backend whose models may be split over several devices."""

    def split_model(
        self, spec: LoadModel, shape: ModelShape, weights: WeightRange, kv_memory: Tensor, region: GroupRegion
    ) -> SplitModel:
        """Returns one share of a model once its weights have arrived. kv_memory: uint8, the memory of the share's KV blocks, from
        block 0 on. region: the memory that the engines of all shares have in common."""
        ...


@dataclass(slots=True, frozen=True)
class OpenDevice:
    """A device that an engine has opened. configure: the engine's settings, with the number of chunks that the device really has.
    left: the weights that an earlier engine left in the device's memory; None: the memory ends with this process."""

    backend: Backend
    configure: Configure
    left: list[WeightsHeld] | None
