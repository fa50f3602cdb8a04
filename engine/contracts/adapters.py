"""Defines the interface by which the code that loads LoRA adapters hands them to a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from engine.protocol import AdapterSource
from loader.adapters.layout import AdapterLayout


@dataclass(slots=True, frozen=True)
class ReadAdapter:
    """A LoRA adapter that has been read into host memory. layout: which matrices it has, and their offsets in `data`. data
    [layout.num_bytes] uint8: the matrices in the model's dtype, byte for byte as they are to lie on the device."""

    layout: AdapterLayout
    data: Any


class AdapterMemory(Protocol):
    """The tables by which a model's steps find its LoRA adapters in device memory. An adapter's index in the tables is the number
    that scheduler/batch/adapters.py has assigned to it."""

    def prepare(self) -> None:
        """Compiles the kernels that steps with adapters need. Called in a thread, before each `read`; it may take a minute the
        first time."""
        ...

    def read(self, source: AdapterSource) -> ReadAdapter:
        """Reads an adapter's files and returns it in host memory. Called in a thread, while steps run. Raises CheckpointError,
        which names the file and the tensor or key, and CheckpointChanged if the files are no longer those of source.fingerprint."""
        ...

    def set(self, number: int, first_byte: int, layout: AdapterLayout) -> None:
        """Enters an adapter into the tables. Called while no step is under way. number: the adapter's index in the tables.
        first_byte: the offset in the KV arena, in bytes, at which its matrices begin. layout: which matrices it has, and their
        offsets from first_byte. Steps that were recorded, or captured as CUDA graphs, before the model's first adapter do not
        compute adapters, so they are recorded or captured again."""
        ...

    def clear(self, number: int) -> None:
        """Removes the adapter with this number from the tables. Called when no running sequence uses the adapter any more."""
        ...
