"""Defines the memory through which the engines of a node run models that are split over several devices.

It is one memfd that the daemon makes: a queue for each engine, then regions, one for each group of devices that shares a model. To
start a step, a group's leader appends the group's region to the queues of all members, its own included, while it holds a lock of
the node. Every engine runs its queue strictly in order. So all engines run the steps that they share in the same order, and
overlapping groups cannot wait for each other.

Readers need no lock. The kernel frees the lock when its holder dies, and entries that a dead leader has posted only in part are not
seen.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import mmap
import os
import struct
import threading
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from engine.host.rank_memory import LINE_BYTES, rank_memory_bytes
from engine.host.rendezvous import rendezvous_words
from engine.host.stage_memory import stage_memory_bytes
from loader.model_shape import Division

QUEUE_ENTRIES = 1024
PAGE_BYTES = mmap.ALLOCATIONGRANULARITY
NOTHING = 0  # an entry whose engine has left the group; a region never begins at 0

_MAGIC = int.from_bytes(b"hearth x", "little")
# Words of a queue: the number of entries ever posted; in another cache line the number ever taken; then the ring of entries.
_TAKEN, _RING = LINE_BYTES // 8, 2 * LINE_BYTES // 8
_word = struct.Struct("<q")


def _pages(num_bytes: int) -> int:
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES


_QUEUE_BYTES = _pages(8 * (_RING + QUEUE_ENTRIES))


def first_region(num_engines: int) -> int:
    """Returns the first offset (bytes) at which a region may begin, behind the queues of num_engines engines. Each region begins at
    a multiple of PAGE_BYTES."""
    return PAGE_BYTES + num_engines * _QUEUE_BYTES


def make_exchange(num_engines: int) -> int:
    """Returns the descriptor of a new exchange memory for engines 0 to num_engines - 1. It has no regions yet."""
    fd = os.memfd_create("hearthd-exchange", os.MFD_CLOEXEC)
    os.ftruncate(fd, first_region(num_engines))
    os.pwrite(fd, struct.pack("<qq", _MAGIC, num_engines), 0)
    return fd


# ---- regions


class RegionArray(NamedTuple):
    """The place of one array in a region. begin: its first byte in the region. code: its item type, as a code of the struct module,
    which numpy understands as well."""

    begin: int
    code: str
    shape: tuple[int, ...]


_ITEM_BYTES = {"q": 8, "Q": 8, "i": 4, "f": 4, "?": 1, "B": 1}

# The columns of scheduler.batch.plan.SequenceTable with one number a sequence.
TABLE_COLUMNS = {
    "request_id": "q",
    "num_tokens": "i",
    "num_prompt": "i",
    "num_computed": "i",
    "temperature": "f",
    "top_p": "f",
    "top_k": "i",
    "seed": "Q",
    "num_logprobs": "i",
    "min_tokens_until": "i",
    "max_total_tokens": "i",
    "ignore_eos": "?",
    "min_p": "f",
    "edits_logits": "?",
    "prompt_logprobs": "?",
    "num_prompt_logprobs": "i",
    "constrained": "?",
    "limited": "?",
    "adapter": "i",
}


class GroupForm(NamedTuple):
    """What the engines of a group need to know about its split model besides the LoadModel. division: how the model is divided
    among the devices. num_kv_groups, handed_bytes: as in RegionSizes. files_id: as in loader.catalog.Checkpoint."""

    division: Division
    num_kv_groups: int = 1
    handed_bytes: int = 0
    files_id: str = ""


class RegionSizes(NamedTuple):
    """The numbers that determine the size of a group's region. num_ranks: number of devices. max_sequences, max_model_len: the
    model's, as in LoadModel. block_tokens: as in Configure. num_kv_groups: number of KV groups of the model (loader/kv_layout.py).
    num_stages: number of stages into which the model's layers are divided. handed_bytes: bytes of the states that a step passes
    from stage to stage (loader/work_space.py)."""

    num_ranks: int
    max_sequences: int
    max_model_len: int
    block_tokens: int
    num_kv_groups: int = 1
    num_stages: int = 1
    handed_bytes: int = 0


def region_layout(sizes: RegionSizes) -> tuple[dict[str, RegionArray], int]:
    """Returns the places of a region's arrays by name, and the size of the whole region in bytes, a multiple of PAGE_BYTES."""
    rows, blocks, num_stages = sizes.max_sequences, -(-sizes.max_model_len // sizes.block_tokens), sizes.num_stages
    stage_size = sizes.num_ranks // num_stages
    arrays: list[tuple[str, str, tuple[int, ...]]] = [
        ("broken", "q", (1,)),  # comes first: break_group writes it
        ("plans", "q", (num_stages, 8)),  # one for each step that may be under way
        *((name, "i", (num_stages, rows)) for name in ("plan_slots", "plan_num_computed", "plan_num_new")),
        ("plan_samples", "?", (num_stages, rows)),
        ("rendezvous", "q", (num_stages, rendezvous_words(stage_size))),
        *((name, code, (rows,)) for name, code in TABLE_COLUMNS.items()),
        ("block_tables", "i", (sizes.num_kv_groups, rows, blocks)),
        ("tokens", "i", (rows, sizes.max_model_len)),
    ]
    parts, end = {}, 0
    for name, code, shape in arrays:
        parts[name] = RegionArray(end, code, shape)
        end = -(-(end + math.prod(shape) * _ITEM_BYTES[code]) // LINE_BYTES) * LINE_BYTES
    of_ranks, of_stages = rank_memory_bytes(stage_size), stage_memory_bytes(stage_size, num_stages, sizes.handed_bytes)
    begin = _pages(end)
    parts["ranks"] = RegionArray(begin, "B", (num_stages, of_ranks))
    parts["stages"] = RegionArray(begin + num_stages * of_ranks, "B", (stage_size, of_stages // stage_size))
    return parts, _pages(begin + num_stages * of_ranks + of_stages)


def region_bytes(sizes: RegionSizes) -> int:
    """Returns the bytes of a group's region, a multiple of PAGE_BYTES. Pages that nobody touches take no memory."""
    return region_layout(sizes)[1]


# ---- queues


class Membership(NamedTuple):
    """One engine's access to the exchange memory. number: the engine's number among the engines of the node. doorbell: the eventfd
    that wakes it."""

    exchange: Exchange
    number: int
    doorbell: int


class ExchangeFull(Exception):
    """Raised by Exchange.post if a member's queue is full, because its engine has not taken the last QUEUE_ENTRIES entries. Nothing
    was posted to any queue."""


class Exchange:
    """One process's view of the exchange memory. fd: the memfd, which the caller goes on owning. doorbells: for each engine the
    eventfd that wakes it; () for a process that posts nothing. Raises ValueError if fd is not an exchange memory. Methods name an
    engine by its number, and a region by its offset in bytes.

    Any thread may call any method, but only one thread of the whole node, in the queue's own engine, takes entries from a queue."""

    def __init__(self, fd: int, doorbells: Sequence[int] = ()) -> None:
        self.fd, self._doorbells = fd, tuple(doorbells)
        head = os.pread(fd, 16, 0)
        magic, num_engines = struct.unpack("<qq", head) if len(head) == 16 else (0, 0)
        if magic != _MAGIC or os.fstat(fd).st_size < first_region(num_engines):
            raise ValueError(f"descriptor {fd} is not of an exchange memory")
        if doorbells and len(doorbells) != num_engines:
            raise ValueError(f"{len(doorbells)} doorbells for an exchange memory of {num_engines} engines")
        self.num_engines = num_engines
        self._map = mmap.mmap(fd, first_region(num_engines))
        self._words = memoryview(self._map).cast("q")
        # flock belongs to the open file description, and all processes share that of `fd`
        self._lock_fd = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        self._in_process = threading.Lock()  # the threads of this process share one description
        self._fence = threading.Lock()

    def close(self) -> None:
        self._words.release()
        self._map.close()
        os.close(self._lock_fd)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Returns a context manager that holds the node's lock, which excludes all other threads and processes. The kernel frees
        the lock if this process dies."""
        with self._in_process:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.flock(self._lock_fd, fcntl.LOCK_UN)

    def post(self, members: Sequence[int], region: int) -> bool:
        """Appends a region to the queues of the group's members (numbers of engines) and rings the doorbells of all but members[0],
        which is the caller. Whatever this thread wrote before is visible to an engine that takes the entry. Returns False, and
        posts nothing, if the group is broken. Raises ExchangeFull if a queue is full."""
        words = self._words
        with self.locked():
            if self.is_broken(region):
                return False
            heads = [words[self._queue(number)] for number in members]
            for number, head in zip(members, heads, strict=True):
                if head - words[self._queue(number) + _TAKEN] >= QUEUE_ENTRIES:
                    raise ExchangeFull(f"the queue of engine {number} is full: it has not taken {QUEUE_ENTRIES} entries")
            for number, head in zip(members, heads, strict=True):
                words[self._entry(number, head)] = region
            self._order()
            for number, head in zip(members, heads, strict=True):
                words[self._queue(number)] = head + 1
        for number in members[1:]:
            self.ring(number)
        return True

    def take(self, number: int) -> int | None:
        """Removes the next entry of an engine's queue, and returns its region; None if there is none."""
        region = self.next(number)
        if region is not None:
            self._words[self._queue(number) + _TAKEN] += 1
        return region

    def next(self, number: int) -> int | None:
        """Returns the region of the next entry of an engine's queue without removing it; None if there is none."""
        words, queue = self._words, self._queue(number)
        tail_at = queue + _TAKEN
        while (tail := words[tail_at]) < words[queue]:
            self._order()
            region = words[self._entry(number, tail)]
            if region != NOTHING:
                return region
            words[tail_at] = tail + 1
        return None

    def has_entries(self, number: int) -> bool:
        """Returns whether an engine's queue has entries. `take` may still find none, if all of them are of groups that the engine
        has left."""
        queue = self._queue(number)
        return self._words[queue + _TAKEN] < self._words[queue]

    def leave(self, number: int, region: int) -> None:
        """Ends an engine's part in a group: breaks the group, so that nobody posts to it any more, and removes the group's entries
        from the engine's queue. Once all members have left or died, another group may get the region."""
        words, queue = self._words, self._queue(number)
        with self.locked():
            self.break_group(region)
            for at in range(words[queue + _TAKEN], words[queue]):
                if words[self._entry(number, at)] == region:
                    words[self._entry(number, at)] = NOTHING

    def reset(self, number: int) -> None:
        """Removes all entries of an engine's queue. A new engine calls it before its first message, because entries may be its
        predecessor's."""
        words, queue = self._words, self._queue(number)
        with self.locked():
            words[queue + _TAKEN] = words[queue]

    def ring(self, number: int) -> None:
        """Wakes an engine, if it sleeps, by its doorbell."""
        with contextlib.suppress(BlockingIOError):  # it has been rung already
            os.eventfd_write(self._doorbells[number], 1)

    def break_group(self, region: int) -> None:
        """Marks the group of a region as broken, because it has lost a device or a member leaves. Members that wait in one of its
        steps stop waiting. Only `clear` undoes it."""
        os.pwrite(self.fd, _word.pack(1), region)

    def is_broken(self, region: int) -> bool:
        return any(os.pread(self.fd, _word.size, region))

    def clear(self, region: int, num_bytes: int) -> None:
        """Gives a region's memory back to the system, so that it reads as zeros afterwards; extends the exchange memory to the
        region's end if it is shorter. The daemon calls it before it gives the region to a group, and when all members have left.
        Raises ValueError if no region can begin at this offset or have this size."""
        if region < first_region(self.num_engines) or region % PAGE_BYTES or num_bytes % PAGE_BYTES or num_bytes <= 0:
            raise ValueError(f"region {region} of {num_bytes} bytes is none of the exchange memory's")
        if os.fstat(self.fd).st_size < region + num_bytes:
            os.ftruncate(self.fd, region + num_bytes)
        with mmap.mmap(self.fd, num_bytes, offset=region) as pages:
            pages.madvise(mmap.MADV_REMOVE)

    def _queue(self, number: int) -> int:
        """Returns the index, in 8-byte words of the exchange memory, of the first word of an engine's queue. Raises ValueError for
        an unknown engine."""
        if not 0 <= number < self.num_engines:
            raise ValueError(f"engine {number} is not among the exchange memory's {self.num_engines}")
        return (PAGE_BYTES + number * _QUEUE_BYTES) // 8

    def _entry(self, number: int, at: int) -> int:
        return self._queue(number) + _RING + at % QUEUE_ENTRIES

    def _order(self) -> None:
        """Acts as a memory fence: the processor moves no memory access across this call. It releases and acquires a lock; a release
        comes after all earlier accesses, and an acquisition before all later ones."""
        for _ in range(2):
            with self._fence:
                pass
