"""A model's weights in the host tier: kept there while they come from disk, and taken from there the next time."""

from __future__ import annotations

import time

from engine.contracts import LoadCancelled, LoadTask
from engine.loading.weight_gate import WeightGate
from engine.memory.chunk_memory import ChunkMemory
from engine.memory.host_tier import HostTier
from engine.memory.transfers import Piece, TransferCancelled, transfer
from engine.memory.weight_range import WeightRange
from loader import checksum


class WeightCopies:
    """Of one device. tier: None where the daemon has none."""

    def __init__(self, memory: ChunkMemory, tier: HostTier | None) -> None:
        self._memory, self._tier = memory, tier

    def take(self, task: LoadTask, weights: WeightRange, gate: WeightGate | None = None) -> bool:
        """Fills the mapped range from spec.source_slots; False if none were given, or with the reason in task.source_rejected if
        they are not to be used. gate: is told what has landed. Raises LoadCancelled."""
        spec = task.spec
        if not spec.source_slots:
            return False
        if self._tier is None:
            task.source_rejected = "this engine was given no host tier"
            return False
        started_s = time.perf_counter()

        def landed(piece: Piece) -> None:
            if gate is not None:
                begin_bytes = piece[0] - weights.address
                gate.landed(begin_bytes, begin_bytes + len(piece[1]))

        try:
            sums = transfer(
                self._memory.copy_in,
                self._pieces(self._tier, spec.source_slots, weights),
                task.cancelled,
                lambda num_bytes: task.progress(num_bytes, weights.num_bytes),
                landed,
            )
        except (ValueError, IndexError) as error:
            task.source_rejected = str(error)
            return False
        except TransferCancelled:
            raise LoadCancelled(f"copy of {spec.model} from the host tier was cancelled") from None
        task.copy_seconds += time.perf_counter() - started_s
        found = checksum.combined(sums)
        if found != spec.checksum:
            task.source_rejected = f"the copy in the host tier has checksum {found:#x}, not {spec.checksum:#x}"
            return False
        task.kept, task.checksum = True, found
        return True

    def keep(self, task: LoadTask, weights: WeightRange) -> None:
        """Copies the range, just read, to spec.keep_slots, if any were given. Raises LoadCancelled, or ValueError or IndexError for
        slots that can't hold it."""
        spec = task.spec
        if not spec.keep_slots:
            return
        if self._tier is None:
            raise ValueError(f"model {spec.model}: keep_slots given, but this engine was given no host tier")
        started_s = time.perf_counter()
        try:
            sums = transfer(self._memory.copy_out, self._pieces(self._tier, spec.keep_slots, weights), task.cancelled)
        except TransferCancelled:
            raise LoadCancelled(f"copy of {spec.model} to the host tier was cancelled") from None
        task.copy_seconds += time.perf_counter() - started_s
        task.kept, task.checksum = True, checksum.combined(sums)

    @staticmethod
    def _pieces(tier: HostTier, slots: list[int], weights: WeightRange) -> list[Piece]:
        addresses = range(weights.address, weights.address + weights.num_bytes, tier.slot_bytes)
        return list(zip(addresses, tier.pieces(slots, weights.num_bytes), strict=True))
