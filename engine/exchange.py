"""Defines the exchange memory: the memory that the engines of a node share to run models that are split over several devices.

It is one memfd that the daemon makes. It holds a queue for each engine, then regions, one for each split model. The engines of one
split model are a group, and each of them is a member of it. To start a step, the engine of rank 0, the leader, appends the offset
of the model's region as an entry to the queues of all members, its own included, while it holds a lock of the node. Every engine
runs the steps in its queue strictly in order. So all engines run the steps that they share in the same order, and groups with
engines in common cannot wait for each other.

Readers need no lock: an entry counts once the queue's count of entries has been raised, which an append does last. If the holder of
the lock dies, the kernel frees the lock."""

from __future__ import annotations

import contextlib
import fcntl
import math
import mmap
import os
import struct
import threading
import time
from collections.abc import Container, Sequence
from typing import NamedTuple

from engine.host.rank_memory import LINE_BYTES, rank_memory_bytes
from engine.host.rendezvous import rendezvous_words
from engine.host.stage_memory import stage_memory_bytes
from loader.reading.memory_fence import MemoryFence
from loader.reading.shared_slots import stage_reads_bytes
from loader.reading.staging import SLOT_BYTES
from loader.shapes.model_shape import Division

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
    """Returns the first offset (bytes) in the engines' shared memory at which a region (the part for one split model) may begin,
    behind the queues of num_engines engines. Each region begins at a multiple of PAGE_BYTES."""
    return PAGE_BYTES + num_engines * _QUEUE_BYTES


def make_exchange(num_engines: int) -> int:
    """Makes the memory that engines 0 to num_engines - 1 share to run split models, and returns its descriptor. It has no regions
    (parts for single models) yet."""
    fd = os.memfd_create("hearthd-exchange", os.MFD_CLOEXEC)
    os.ftruncate(fd, first_region(num_engines))
    os.pwrite(fd, struct.pack("<qq", _MAGIC, num_engines), 0)
    return fd


# ---- regions


class RegionArray(NamedTuple):
    """The place of one array in the region of a split model (its part of the engines' shared memory). begin: the offset of its
    first byte in the region. code: its item type, as a code of the struct module, which numpy understands as well."""

    begin: int
    code: str
    shape: tuple[int, ...]


PLAN_HEAD_BYTES, PLAN_ROW_BYTES = 16, 3 * 4 + 1  # of a plan in a region: its head, and the columns of each row
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
    """The properties of a split model that its engines are told in LoadModel.group, and that the daemon works out before the load.
    division: how the model is divided among the devices.
    num_kv_groups: number of the model's KV groups.
    handed_bytes: bytes of the states that a step passes from one pipeline stage to the next.
    files_id: identifies the model's files on every host, as in loader.models.catalog.Checkpoint."""

    division: Division
    num_kv_groups: int = 1
    handed_bytes: int = 0
    files_id: str = ""


class RegionSizes(NamedTuple):
    """The numbers that determine the size of the region of a split model (its part of the engines' shared memory).
    num_ranks: number of devices.
    max_sequences: most sequences of the model that run at a time.
    max_model_len: most tokens of one sequence.
    block_tokens: number of tokens in a KV block.
    num_kv_groups: number of KV groups of the model (loader/shapes/kv_layout.py).
    num_stages: number of pipeline stages into which the model's layers are divided.
    handed_bytes: bytes of the states that a step passes from one pipeline stage to the next (loader/sizes/work_space.py).
    expert_parts: number of parts into which a layer's experts are divided, as in Division."""

    num_ranks: int
    max_sequences: int
    max_model_len: int
    block_tokens: int
    num_kv_groups: int = 1
    num_stages: int = 1
    handed_bytes: int = 0
    expert_parts: int = 1


def plan_bytes(num_rows: int) -> int:
    """Returns how many bytes the plan of a step takes in the region of a split model (its part of the engines' shared memory), for
    at most num_rows rows (engine/memory/shared_plans.py)."""
    return -(-(PLAN_HEAD_BYTES + num_rows * PLAN_ROW_BYTES) // LINE_BYTES) * LINE_BYTES


def region_layout(sizes: RegionSizes) -> tuple[dict[str, RegionArray], int]:
    """Returns the places of the arrays in the region of a split model (its part of the engines' shared memory), by name, and the
    size of the whole region in bytes, which is a multiple of PAGE_BYTES."""
    rows, blocks, num_stages = sizes.max_sequences, -(-sizes.max_model_len // sizes.block_tokens), sizes.num_stages
    stage_size = sizes.num_ranks // num_stages
    arrays: list[tuple[str, str, tuple[int, ...]]] = [
        ("broken", "q", (1,)),  # comes first: break_group writes it
        ("plans", "B", (num_stages, plan_bytes(rows))),  # one for each step that may be under way
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
    begin = _pages(begin + num_stages * of_ranks + of_stages)
    of_reads = stage_reads_bytes(stage_size, sizes.expert_parts, SLOT_BYTES)
    parts["reads"] = RegionArray(begin, "B", (num_stages, of_reads))
    return parts, _pages(begin + num_stages * of_reads)


def region_bytes(sizes: RegionSizes) -> int:
    """Returns the bytes of the region of a split model (its part of the engines' shared memory), a multiple of PAGE_BYTES. Pages
    that nobody touches take no memory."""
    return region_layout(sizes)[1]


# ---- queues


class Membership(NamedTuple):
    """One engine's access to the memory that engines share to run split models. number: the engine's number among the engines of
    the node. doorbell: the eventfd that wakes this engine."""

    exchange: Exchange
    number: int
    doorbell: int


class ExchangeFull(Exception):
    """Raised when a step of a split model is posted (Exchange.post, Poster.post) and the queue of one of the model's engines is
    full: that engine has not taken any of the last QUEUE_ENTRIES entries. Nothing was posted to any queue."""


class Exchange:
    """One process's view of the exchange memory, which engines share to run split models. Methods name an engine by its number, and
    a split model by the offset in bytes of its region (its part of the memory).
    fd: the memfd; the caller still owns it and closes it.
    doorbells: for each engine the eventfd that wakes it; () for a process that posts nothing.
    Raises ValueError if fd is not an exchange memory, or if the doorbells are not one for each engine.

    Any thread may call any method. Entries are taken from a queue only by one thread of the queue's own engine."""

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
        self._lock = _NodeLock(fd)

    def close(self) -> None:
        self._words.release()
        self._map.close()
        self._lock.close()

    def locked(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context manager that holds the node's lock, which excludes all other threads and processes. The kernel frees
        the lock if this process dies."""
        return self._lock

    def post(self, members: Sequence[int], region: int) -> bool:
        """Starts the next step of a split model: appends an entry, the offset of the model's region (its part of the shared
        memory), to the queue of each of its engines. Returns True. Returns False, and posts nothing, if the model is broken (has
        lost a device, or an engine has left). Raises ExchangeFull if a queue is full. members: the engines' numbers, the caller's
        first."""
        return Poster(self, members, region).post()

    def queue(self, number: int) -> EngineQueue:
        """Returns the queue of an engine, for the thread that takes entries from it. Raises ValueError for an unknown engine."""
        return EngineQueue(self, number)

    def leave(self, number: int, region: int) -> None:
        """Ends an engine's part in a split model: marks the model as broken, so that nobody posts steps of it any more, and removes
        its entries from the engine's queue. Once all engines of the model have left or died, another model may get the region (part
        of the shared memory)."""
        words, queue = self._words, self._queue(number)
        with self.locked():
            self.break_group(region)
            for at in range(words[queue + _TAKEN], words[queue]):
                if words[self._entry(number, at)] == region:
                    words[self._entry(number, at)] = NOTHING

    def reset(self, number: int) -> None:
        """Removes all entries from an engine's queue. A new engine calls it before it sends its first message to the daemon,
        because an earlier engine with the same number may have left entries in the queue."""
        words, queue = self._words, self._queue(number)
        with self.locked():
            words[queue + _TAKEN] = words[queue]

    def ring(self, number: int) -> None:
        """Wakes an engine, if it sleeps, by writing to its doorbell."""
        with contextlib.suppress(BlockingIOError):  # it has been rung already
            os.eventfd_write(self._doorbells[number], 1)

    def break_group(self, region: int) -> None:
        """Marks the split model of a region (part of the shared memory) as broken, because it has lost a device or one of its
        engines leaves. Engines that wait in one of the model's steps stop waiting. Only `clear` ends this state."""
        os.pwrite(self.fd, _word.pack(1), region)

    def is_broken(self, region: int) -> bool:
        return any(os.pread(self.fd, _word.size, region))

    def clear(self, region: int, num_bytes: int) -> None:
        """Returns the memory of a region (the part for one split model) to the system, so that the region reads as zeros
        afterwards; extends the exchange memory to the region's end if it is shorter. The daemon calls it before a model gets the
        region, and when all engines of the model have left. Raises ValueError if no region can begin at this offset or have this
        size."""
        if region < first_region(self.num_engines) or region % PAGE_BYTES or num_bytes % PAGE_BYTES or num_bytes <= 0:
            raise ValueError(f"region {region} of {num_bytes} bytes is none of the exchange memory's")
        if os.fstat(self.fd).st_size < region + num_bytes:
            os.ftruncate(self.fd, region + num_bytes)
        with mmap.mmap(self.fd, num_bytes, offset=region) as pages:
            pages.madvise(mmap.MADV_REMOVE)

    def _queue(self, number: int) -> int:
        """Returns the index, in 8-byte words of the engines' shared memory, of the first word of an engine's queue. Raises
        ValueError for an unknown engine."""
        if not 0 <= number < self.num_engines:
            raise ValueError(f"engine {number} is not among the exchange memory's {self.num_engines}")
        return (PAGE_BYTES + number * _QUEUE_BYTES) // 8

    def _entry(self, number: int, at: int) -> int:
        return self._queue(number) + _RING + at % QUEUE_ENTRIES


class EngineQueue:
    """The queue of the steps of split models that one engine is to run, in the memory that the engines share. Used only by the
    thread that takes entries from the queue. number: the engine's number.

    An entry is the offset, in that memory, of the region (part) of one split model. It says that the engine is to run its share of
    that model's next step."""

    def __init__(self, exchange: Exchange, number: int) -> None:
        self.number, self._words, self._fence = number, exchange._words, MemoryFence()
        self._posted = begin = exchange._queue(number)
        self._taken, self._ring = begin + _TAKEN, begin + _RING

    def take(self, but: Container[int] = ()) -> int | None:
        """Removes the next entry from the queue and returns it: the offset of the region (part of the shared memory) of the split
        model whose step is to run. Returns None if there is no entry, or if the next entry is in `but`; that entry stays in the
        queue. Entries of models that the engine has left are skipped."""
        words = self._words
        while (tail := words[self._taken]) < words[self._posted]:
            self._fence.order()
            region: int = words[self._ring + tail % QUEUE_ENTRIES]
            if region in but:
                return None
            words[self._taken] = tail + 1
            if region != NOTHING:
                return region
        return None

    def first(self) -> int | None:
        """Returns the queue's next entry, and leaves it in the queue: the offset of the region (part of the shared memory) of the
        split model whose step is to run. Returns None if there is no entry. Entries of models that the engine has left are
        skipped."""
        words, at = self._words, self._words[self._taken]
        while at < words[self._posted]:
            self._fence.order()
            region: int = words[self._ring + at % QUEUE_ENTRIES]
            if region != NOTHING:
                return region
            at += 1
        return None

    def has_entries(self) -> bool:
        """Returns whether the queue has entries, including those of split models that the engine has left, which `take` skips."""
        return bool(self._words[self._taken] != self._words[self._posted])

    def comes_within(self, most_s: float) -> bool:
        """Waits for an entry in the queue, for most_s seconds at most, by polling. Returns whether the queue has any, as
        has_entries does."""
        words, posted, now = self._words, self._posted, time.perf_counter
        taken, until_s = words[self._taken], now() + most_s
        while words[posted] == taken:
            if now() >= until_s:
                return False
        return True


class Poster:
    """Posts the steps of one split model to the queues of its engines. members: the numbers of these engines, the caller's first.
    region: the offset in bytes of the model's region (its part of the shared memory). broken: the region's first word, if the
    caller has mapped the region, which saves a system call for each post; None: the word is read from the memfd.

    Everything that depends on the model alone is computed once, in advance, because the model's next step cannot start before its
    post has ended."""

    def __init__(self, exchange: Exchange, members: Sequence[int], region: int, broken: memoryview | None = None) -> None:
        self._exchange, self._members, self._region, self._broken = exchange, tuple(members), region, broken
        self._queues = [exchange._queue(number) for number in members]
        self._words, self._lock, self._fence = exchange._words, exchange._lock, MemoryFence()
        self._taken = [0] * len(self._queues)  # by member: number of entries that it had taken when last asked

    def post(self) -> bool:
        """Starts the split model's next step: appends the offset of its region to the queues of its engines, and rings the
        doorbells of all but the caller. An engine that takes the entry sees everything that this thread wrote before. Returns True;
        returns False, and posts nothing, if the model is broken (has lost a device, or an engine has left). Raises ExchangeFull if
        a queue is full."""
        words, queues = self._words, self._queues
        with self._lock:
            if self._exchange.is_broken(self._region) if self._broken is None else self._broken[0]:
                return False
            for at, queue in enumerate(queues):
                head = words[queue]
                if head - self._taken[at] >= QUEUE_ENTRIES:  # another core's cache holds the member's own count
                    self._taken[at] = taken = words[queue + _TAKEN]
                    if head - taken >= QUEUE_ENTRIES:
                        number = self._members[at]
                        raise ExchangeFull(f"the queue of engine {number} is full: it has not taken {QUEUE_ENTRIES} entries")
                words[queue + _RING + head % QUEUE_ENTRIES] = self._region  # nobody sees it before the count is raised
            self._fence.order()
            for queue in reversed(queues):  # the caller's own comes last, because nobody waits for that
                words[queue] += 1
        for number in self._members[1:]:
            self._exchange.ring(number)
        return True


class _NodeLock:
    """A context manager that holds the node's lock, which excludes all other threads and processes that use the engines' shared
    memory `fd`."""

    def __init__(self, fd: int) -> None:
        # flock belongs to the open file description, and all processes share that of `fd`
        self._fd = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        self._in_process = threading.Lock()  # the threads of this process share one description

    def __enter__(self) -> None:
        self._in_process.acquire()
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX)
        except BaseException:
            self._in_process.release()
            raise

    def __exit__(self, *_: object) -> None:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_UN)
        finally:
            self._in_process.release()

    def close(self) -> None:
        os.close(self._fd)
