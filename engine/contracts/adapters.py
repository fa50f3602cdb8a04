"""Defines the interface between the code that loads LoRA adapters and a model that takes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from engine.protocol import AdapterSource
from loader.adapters.layout import AdapterLayout


@dataclass(slots=True, frozen=True)
class ReadAdapter:
    """A LoRA adapter that has been read into host memory. layout: which matrices it has, and their places in data. data
    [layout.num_bytes] uint8: the matrices in the model's dtype, byte for byte as they are to lie on the device."""

    layout: AdapterLayout
    data: Any


class AdapterMemory(Protocol):
    """The tables in which the steps of one model look up where its LoRA adapters lie in device memory. An adapter's index in the
    tables is the number that scheduler/batch/adapters.py assigns to it."""

    def prepare(self) -> None:
        """Compiles the kernels without which steps with adapters cannot run. Called in a thread, before each `read`; it may take a
        minute the first time."""
        ...

    def read(self, source: AdapterSource) -> ReadAdapter:
        """Reads an adapter's files into host memory. Called in a thread, while steps run. Raises CheckpointError, which names the
        file and the tensor or key, and CheckpointChanged if the files are no longer those of source.fingerprint."""
        ...

    def set(self, number: int, first_byte: int, layout: AdapterLayout) -> None:
        """Enters an adapter into the tables. number: the adapter's index in the tables. first_byte: where its matrices begin in the
        arena. layout: which matrices there are, and their places. Called while no step is under way. With the first adapter the
        model begins to compute adapters: its steps are recorded, or captured, again."""
        ...

    def clear(self, number: int) -> None:
        """Removes the adapter with this number, which no running sequence uses any more, from the tables."""
        ...
