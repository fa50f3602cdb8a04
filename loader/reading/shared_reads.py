"""Defines the memory through which the ranks of a split model share reads.

If devices have columns of a matrix, each of them needs parts of all rows; other matrices all devices have whole. The ranks take
turns to read such rows from the drive: each one reads some of them and offers them in this memory, and the others copy them from
there. So the drive delivers each byte once, whatever the number of ranks. The same holds among the ranks that have the same
experts.

Nobody waits for another rank for long. A rank that finds no free slot for what it has read offers it to nobody, and a rank that is
offered nothing reads from the file itself. So ranks may begin at any time, fail, or get their weights elsewhere.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Sequence
from enum import Enum

import numpy as np
import numpy.typing as npt

from loader.reading.memory_fence import MemoryFence
from loader.reading.range_plan import Read
from loader.reading.shared_slots import (
    ENDED,
    KEYS,
    LEFT,
    NUM_SLOTS,
    NUMBERS,
    TAKEN,
    num_words,
    shared_reads_bytes,
    stage_reads_bytes,
    words_bytes,
)


class Offer(Enum):
    """The state of a read that another rank carries out. COMING: the rank has not carried out the read yet. READY: the read's bytes
    are in a slot. NONE: the rank offers the read to nobody."""

    COMING = "coming"
    READY = "ready"
    NONE = "none"


class SharedReads:
    """A rank's view of the memory through which the ranks of a split model share reads. memory: all of it, of shared_reads_bytes
    bytes. rank: this rank's index. size: number of ranks. slot_bytes: the length of the longest read. Methods may be called by any
    thread. Raises ValueError for memory of another size.

    All ranks number the shared reads alike; rank r carries out the reads whose number modulo `size` is r. In methods, `number` is a
    read's index among the reads of one rank."""

    def __init__(self, memory: npt.NDArray[np.uint8], rank: int, size: int, slot_bytes: int) -> None:
        if len(memory) != shared_reads_bytes(size, slot_bytes):
            raise ValueError(f"{len(memory)} bytes are not the memory of {size} ranks that share reads of {slot_bytes} bytes")
        self.rank, self.size, self.slot_bytes = rank, size, slot_bytes
        begin = words_bytes(size)
        self._words = memory[: size * num_words(size) * 8].view(np.int64).reshape(size, -1)
        self._own = self._words[rank]
        self._slots = memory[begin:]
        self._done: dict[int, set[int]] = {other: set() for other in range(size)}  # ended or taken out of turn
        self._lock = threading.Lock()
        self._fence = MemoryFence()

    def leave(self) -> bool:
        """Records that this rank neither offers nor takes reads any more. Returns whether all ranks have left, so that nobody uses
        the slots again."""
        with self._lock:
            self._fence.order()
            self._own[LEFT] = 1
            self._fence.order()
        return bool(self._words[:, LEFT].all())

    def has_room(self, number: int) -> bool:
        """Returns whether this rank may offer its read `number`: all other ranks have taken the read that was in its slot
        before."""
        return all(
            self._words[other, LEFT] or self._words[other, TAKEN + self.rank] > number - NUM_SLOTS
            for other in range(self.size)
            if other != self.rank
        )

    def offer(self, number: int, read: Read, data: memoryview) -> None:
        """Copies the bytes of this rank's read `number` to a slot, from which the other ranks may take them. has_room must have
        returned True for it. data: the bytes."""
        slot = number % NUM_SLOTS
        with self._lock:
            self._fence.order()
        self._slot(self.rank, slot)[: len(data)] = np.frombuffer(data, np.uint8)
        with self._lock:
            self._own[KEYS + slot] = _key(read)
            self._fence.order()
            self._own[NUMBERS + slot] = number + 1

    def end(self, number: int) -> None:
        """Records that this rank is done with its read `number`. If the rank has not offered the read by now, the others know that
        it never will."""
        with self._lock:
            self._count(ENDED, self.rank, number)

    def look(self, owner: int, number: int, read: Read) -> Offer:
        """Returns whether the rank `owner` offers its read `number`: COMING, READY or NONE (Offer). read: the same read in this
        rank's plan; if the owner's differs, the result is NONE."""
        words, slot = self._words[owner], number % NUM_SLOTS
        is_over = bool(words[LEFT]) or words[ENDED] > number
        with self._lock:
            self._fence.order()
            if words[NUMBERS + slot] == number + 1:
                self._fence.order()
                return Offer.READY if words[KEYS + slot] == _key(read) else Offer.NONE
        return Offer.NONE if is_over else Offer.COMING

    def data(self, owner: int, number: int) -> memoryview:
        """Returns the bytes of the slot that holds the read `number` of the rank `owner`, which must be READY. They stay until
        `take` is called."""
        return self._slot(owner, number % NUM_SLOTS).data

    def take(self, owner: int, number: int) -> None:
        """Records that this rank no longer needs the bytes of the read `number` of the rank `owner`, whose slot may then be used
        again."""
        with self._lock:
            self._count(TAKEN + owner, owner, number)

    def _count(self, column: int, whose: int, number: int) -> None:
        """Records that this rank is done with the read `number` of the rank `whose`. The word of shared memory with the index
        `column` counts these reads; it counts a read only once all reads before it are done."""
        done, count = self._done[whose], int(self._own[column])
        done.add(number)
        self._fence.order()
        while count in done:
            done.remove(count)
            count += 1
        self._own[column] = count

    def _slot(self, owner: int, slot: int) -> npt.NDArray[np.uint8]:
        begin = (owner * NUM_SLOTS + slot) * self.slot_bytes
        return self._slots[begin : begin + self.slot_bytes]


def shared_by(memory: npt.NDArray[np.uint8], rank: int, size: int, expert_parts: int, slot_bytes: int) -> tuple[SharedReads, ...]:
    """Returns one rank's views of the memory through which the ranks of a stage share reads: of the part that all of them use, and,
    if ranks have the same experts, of the part that these use. memory: all of it, of stage_reads_bytes bytes. rank: the rank's
    index in the stage. size: number of ranks. expert_parts: number of parts, of whole experts, into which the experts of a layer
    are divided. Raises ValueError for memory of another size."""
    if len(memory) != stage_reads_bytes(size, expert_parts, slot_bytes):
        what = f"{size} ranks with {expert_parts} parts of experts that share reads of {slot_bytes} bytes"
        raise ValueError(f"{len(memory)} bytes are not the memory of {what}")
    begin, inner = shared_reads_bytes(size, slot_bytes), size // expert_parts
    of_all = SharedReads(memory[:begin], rank, size, slot_bytes)
    if expert_parts == 1 or inner == 1:
        return (of_all,)
    part, inner_part = divmod(rank, inner)
    num_bytes = shared_reads_bytes(inner, slot_bytes)
    own = memory[begin + part * num_bytes :][:num_bytes]
    return of_all, SharedReads(own, inner_part, inner, slot_bytes)


def leave(shared: Sequence[SharedReads]) -> bool:
    """Records in the shared memory that a rank neither offers nor takes reads any more. Returns whether all ranks of the stage have
    left, so that nobody uses the memory again. shared: the rank's views of the memory (shared_by)."""
    return [each.leave() for each in reversed(shared)][-1]


def _key(read: Read) -> int:
    """Returns a checksum of a read's file and range, by which ranks recognise that their plans have the same read."""
    return zlib.crc32(f"{read.file} {read.begin} {read.end}".encode())
