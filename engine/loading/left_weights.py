"""Reuses a model's weights that are already in the device's memory, without moving them. Weights that an earlier engine process
left are used only if their checksum is right.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from engine.contracts.loads import LoadCancelled, LoadTask
from engine.memory.chunk_memory import ChunkMemory, EndedCopy
from engine.memory.transfers import Piece, TransferCancelled, transfer
from engine.memory.weight_gate import WeightGate
from loader.packing import checksum
from scheduler.batch.plan import IntArray

if TYPE_CHECKING:  # engines of null models do not need torch
    from engine.memory.weight_range import WeightRange

log = logging.getLogger("engine")


def adopt(memory: ChunkMemory, task: LoadTask, weights: WeightRange, gate: WeightGate | None = None) -> bool:
    """Takes over the weights that an earlier load has left in the device's memory (task.left), if they are those that the load
    needs. The mapped range `weights` consists of the same chunks. Returns whether the size and the checksum of the weights are
    right, and sets task.adopted if they are. Of weights without a checksum only the size is checked: this engine process has left
    them itself, and knows that nothing else has used their chunks.

    gate: notified of the bytes whose checksum has been computed; None: no step waits for weights. Raises LoadCancelled if the load
    is cancelled."""
    left = task.left
    if left is None or left.num_bytes != weights.num_bytes:
        return False
    if not left.checksum:
        if gate is not None:
            gate.landed(0, weights.num_bytes)
        task.adopted = True
        return True

    def landed(piece: Piece) -> None:
        if gate is not None:
            begin_bytes = piece[0] - weights.address
            gate.landed(begin_bytes, begin_bytes + len(piece[1]))

    size, total = memory.chunk_bytes, weights.num_bytes
    pieces: list[Piece] = [(weights.address + at, range(min(size, total - at))) for at in range(0, total, size)]
    try:
        sums = transfer(
            lambda address, extent: EndedCopy(memory.checksum(address, len(extent))),
            pieces,
            task.cancelled,
            lambda num_bytes: task.progress(num_bytes, total),
            landed,
        )
    except TransferCancelled:
        raise LoadCancelled(f"{task.spec.model}: cancelled while its weights were summed up") from None
    found = checksum.combined(sums)
    if found != left.checksum:
        text = "the weights of %s that an engine before this one has left are not used: checksum %#x, not %#x"
        log.warning(text, task.spec.model, found, left.checksum)
        return False
    task.adopted, task.weights_checksum = True, found
    if task.spec.source_slots:  # the copy in the host tier, which was not checked, counts as valid as before
        task.kept, task.checksum = True, task.spec.checksum
    return True


def checksum_of(memory: ChunkMemory, chunks: IntArray, num_bytes: int) -> int:
    """Returns the checksum of num_bytes of weights that fill these chunks in their order. Reads the chunks at their addresses in
    the arena, so the model's own address range may be unmapped meanwhile."""
    size, arena = memory.chunk_bytes, memory.arena.data_ptr()
    places = zip(chunks.tolist(), range(0, num_bytes, size), strict=False)
    return checksum.combined([memory.checksum(arena + chunk * size, min(size, num_bytes - at)) for chunk, at in places])
