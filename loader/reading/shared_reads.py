"""Defines the memory through which the ranks (devices) of a split model share reads.

Ranks share reads of rows of which each rank needs a part, because columns are divided, and of matrices that each rank has whole.
Each rank reads some of them from the drive and offers them in this memory, and the other ranks copy them from it. So the drive
delivers each byte once, whatever the number of ranks. Ranks with the same experts share the reads of these experts in the same way.

No rank waits for another one for long. A rank that finds no free slot for its bytes does not offer them, and a rank that is offered
nothing reads from the file itself. So ranks may begin at any time, fail, or get their weights from elsewhere.
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
    """The state of a read that another rank (device of a split model) is to carry out for all ranks. COMING: the rank has not
    carried out the read yet. READY: the read's bytes are in the shared memory. NONE: the rank does not offer the read."""

    COMING = "coming"
    READY = "ready"
    NONE = "none"


class SharedReads:
    """One rank's view of the memory through which the ranks (devices) of a split model share reads. A rank offers the bytes of a
    read in a slot of this memory, and the other ranks copy them. Methods may be called by any thread. memory: the whole memory, of
    shared_reads_bytes bytes. rank: this rank's index. size: number of ranks. slot_bytes: the length of the longest read. Raises
    ValueError for memory of another size.

    The shared reads have the same order in all ranks, and each is carried out by one rank, its owner: the read with the index i by
    rank i % size. In methods, `number` is a read's index among the reads of its owner, i // size."""

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
        """Records that this rank (device of a split model) neither offers nor takes reads any more. Returns whether all ranks have
        left; if True, nobody uses the memory any more."""
        with self._lock:
            self._fence.order()
            self._own[LEFT] = 1
            self._fence.order()
        return bool(self._words[:, LEFT].all())

    def has_room(self, number: int) -> bool:
        """Returns whether this rank (device of a split model) may offer its read `number`, because the slot of the shared memory
        for it is free: all other ranks are done with the earlier read in this slot, or have left."""
        return all(
            self._words[other, LEFT] or self._words[other, TAKEN + self.rank] > number - NUM_SLOTS
            for other in range(self.size)
            if other != self.rank
        )

    def offer(self, number: int, read: Read, data: memoryview) -> None:
        """Copies the bytes of this rank's read `number` to a slot of the shared memory, from which the other ranks (devices of a
        split model) may take them. read: the read. data: its bytes. has_room must have returned True for it."""
        slot = number % NUM_SLOTS
        with self._lock:
            self._fence.order()
        self._slot(self.rank, slot)[: len(data)] = np.frombuffer(data, np.uint8)
        with self._lock:
            self._own[KEYS + slot] = _key(read)
            self._fence.order()
            self._own[NUMBERS + slot] = number + 1

    def end(self, number: int) -> None:
        """Records in the shared memory that this rank (device of a split model) is done with its read `number`. If this rank has
        not offered the read by now, the other ranks see that it never will."""
        with self._lock:
            self._count(ENDED, self.rank, number)

    def look(self, owner: int, number: int, read: Read) -> Offer:
        """Returns whether another rank (device of a split model), `owner`, offers its read `number`: COMING, READY or NONE (Offer).
        read: the read with this number in this rank's plan; the result is also NONE if the owner's plan has another read with this
        number."""
        words, slot = self._words[owner], number % NUM_SLOTS
        is_over = bool(words[LEFT]) or words[ENDED] > number
        with self._lock:
            self._fence.order()
            if words[NUMBERS + slot] == number + 1:
                self._fence.order()
                return Offer.READY if words[KEYS + slot] == _key(read) else Offer.NONE
        return Offer.NONE if is_over else Offer.COMING

    def data(self, owner: int, number: int) -> memoryview:
        """Returns the bytes of the read `number` that another rank (device of a split model), `owner`, offers: a view of its slot
        in the shared memory. `look` must have returned READY. The bytes stay unchanged until this rank calls `take`."""
        return self._slot(owner, number % NUM_SLOTS).data

    def take(self, owner: int, number: int) -> None:
        """Records that this rank (device of a split model) no longer needs the read `number` of the rank `owner`. Once all other
        ranks have done so, the owner may reuse the slot of the shared memory that holds the read."""
        with self._lock:
            self._count(TAKEN + owner, owner, number)

    def _count(self, column: int, whose: int, number: int) -> None:
        """Records in the shared memory that this rank (device of a split model) is done with the read `number` of the rank `whose`,
        which may be this rank itself. column: index of this rank's word that counts such reads. A value n of the word means that
        the reads 0 to n - 1 are all done; the word does not count a read before all earlier ones are done."""
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
    """Returns one rank's views of the memory through which the ranks (devices) of a pipeline stage share reads: a view of the part
    that all these ranks use and, if several ranks have the same experts, a view of the part that those with this rank's experts
    use. memory: all of it, of stage_reads_bytes bytes. rank: the rank's index in the stage. size: number of ranks of the stage.
    expert_parts: number of parts, of whole experts, into which the experts of a layer are divided. Raises ValueError for memory of
    another size."""
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
    """Records in the shared memory that a rank (device of a split model) neither offers nor takes reads any more. Returns whether
    all ranks of the stage have left; if True, nobody uses the memory any more. shared: the rank's views of the memory
    (shared_by)."""
    return [each.leave() for each in reversed(shared)][-1]


def _key(read: Read) -> int:
    """Returns a checksum of a read's file and range, by which a rank (device of a split model) checks that another rank's plan has
    the same read."""
    return zlib.crc32(f"{read.file} {read.begin} {read.end}".encode())
