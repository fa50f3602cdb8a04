"""Defines the interface between the code that loads LoRA adapters and a model that takes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from engine.protocol import AdapterSource
from loader.adapters.layout import AdapterLayout


@dataclass(slots=True, frozen=True)
class ReadAdapter:
    """An adapter in host memory. data [layout.num_bytes] uint8: its matrices in the model's dtype, as they lie on the device."""

    layout: AdapterLayout
    data: Any


class AdapterMemory(Protocol):
    """A model's tables of the adapters in device memory, indexed by the adapters' numbers (scheduler/batch/adapters.py)."""

    def prepare(self) -> None:
        """Compiles the kernels without which steps with adapters cannot run. Called in a thread, before each `read`; it may take a
        minute the first time."""
        ...

    def read(self, source: AdapterSource) -> ReadAdapter:
        """Reads an adapter's files. Called in a thread, while steps run. Raises CheckpointError, which names the file and the
        tensor or key, and CheckpointChanged."""
        ...

    def set(self, number: int, first_byte: int, layout: AdapterLayout) -> None:
        """Registers an adapter whose matrices lie in the arena from first_byte on. Called while no step is under way. After the
        first adapter the model's steps are recorded, or captured, again, and from then on compute adapters, too."""
        ...

    def clear(self, number: int) -> None:
        """Removes an adapter that no row uses any more."""
        ...
