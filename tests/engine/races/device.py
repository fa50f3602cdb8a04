"""A stand-in for the device under torch: streams, events, captured graphs, torch's allocator of device memory, cuBLAS's handles and
work spaces, and the default generator. Nothing is computed. An operation gets the clock of its stream and notes what it accesses.

As torch does it (aten/src/ATen/cuda: CublasHandlePool.cpp, detail/DeviceThreadHandles.h, CUDAGraph.cpp, CUDAGeneratorImpl.cpp;
c10/cuda: CUDACachingAllocator.cpp, CUDAStream.cpp):

- memory that is freed is given out again at once, to the same pool and stream;
- a work space is kept for each pair of a handle and a stream, taken from the graph's pool if that happens within a capture;
- a thread keeps its handle until it ends, and the thread that asks next gets it then;
- torch.cuda.Stream() gives out the same 32 streams in turn.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from tests.engine.races.clocks import Clock, Memory
from tests.engine.races.schedule import Host, Schedule

NUM_STREAMS = 32
PAGE_LOCKED = -1  # in place of a pool's number
FIRST_ADDRESS, ADDRESS_STEP = 1 << 60, 1 << 32  # of blocks: far from all addresses of the host


@dataclass(slots=True, frozen=True)
class Rules:
    """What differs between versions of torch. drops_work_spaces: destroying a graph frees the work spaces of its stream (since
    2.12). one_generator_state: a capture puts the default generator into its mode for all threads (until 2.12)."""

    drops_work_spaces: bool
    one_generator_state: bool


TORCH = {"2.11": Rules(False, True), "2.12": Rules(True, True), "2.13": Rules(True, False)}


@dataclass(slots=True, eq=False)
class Block:
    """Memory of torch's allocator. number: how often it was given out. pool: of graphs; None: the general one. address: what the
    driver is told where it copies to the block. value: by which ranks tell each other whether they agree."""

    pool: int | None
    stream: Stream
    size: Hashable
    what: str = ""
    number: int = 0
    is_free: bool = False
    address: int = 0
    value: float = 0.0


class Storage:
    """A block as long as a tensor holds it."""

    def __init__(self, device: Device, block: Block) -> None:
        self._device, self.block = device, block

    def __del__(self) -> None:
        self._device.free(self.block)


@dataclass(slots=True, frozen=True)
class Named:
    """Memory that is known by its name alone. kind: in words, for faults."""

    name: Hashable
    kind: str


# What an operation does besides its accesses, at the time when the device runs it.
Action = Callable[["Stream"], None]
# One access of an operation: the place, and whether it is written. A place is a block with its number when the operation was
# launched or captured; an address with a length, which stands for the chunks that are mapped there when the operation runs; "kv",
# "adapters" or "masks", the KV, the LoRA adapters or the page-locked masks of the step in progress; a Named; or else the name of
# host memory.
Access = tuple[Any, bool]


class Stream:
    """is_busy: whether an operation is under way that waits for another device. marks: events that were recorded behind it."""

    def __init__(self, device: Device, name: str) -> None:
        self._device, self.name, self.clock = device, name, Clock()
        self.cuda_stream = name  # the driver's handle
        self.capturing: Graph | None = None
        self.is_busy, self.marks = False, list[Event]()

    def told(self) -> Clock:
        """Returns what another actor knows from now on that learns what the operation under way has done so far. What it does
        later has another number."""
        told = Clock(self.clock)
        self.clock[self.name] = self.clock.get(self.name, 0) + 1
        return told

    def begin(self, lasts: bool) -> None:
        """Begins an operation, after the one before it. lasts: whether it waits for another device; `end` then ends it."""
        self._device.schedule.wait(lambda: not self.is_busy, f"the operation under way on {self.name}")
        self.is_busy = lasts

    def end(self) -> None:
        self.is_busy = False
        for event in self.marks:
            event.clock, event.is_behind = Clock(self.clock), False
        self.marks.clear()

    def wait_stream(self, other: Stream) -> None:
        self.clock.join(other.reached())
        self.clock.join(self._device.schedule.host.clock)
        self._device.schedule.host.tick()

    def wait_event(self, event: Event) -> None:
        event.await_record()
        self.clock.join(event.clock)
        self.clock.join(self._device.schedule.host.clock)
        self._device.schedule.host.tick()

    def synchronize(self) -> None:
        self._device.schedule.point()
        self._device.waits_in_capture(self.name)
        self._device.schedule.host.clock.join(self.reached())

    def query(self) -> bool:
        """Returns whether everything launched so far has ended, which it may have without being told yet."""
        has_ended = not self.is_busy and self._device.schedule.random.random() < 0.5
        if has_ended:
            self._device.schedule.host.clock.join(self.clock)
        return has_ended

    def reached(self) -> Clock:
        """Waits until everything launched so far has ended, and returns what is known then."""
        if not self.is_busy:
            return self.clock
        mark = Event(self._device, False)
        mark.record(self)
        mark.await_record()
        return mark.clock


class Event:
    """is_behind: whether it was recorded behind an operation that is still under way."""

    def __init__(self, device: Device, timed: bool) -> None:
        self._device, self._timed, self.clock, self.is_behind = device, timed, Clock(), False

    def await_record(self) -> None:
        self._device.schedule.wait(lambda: not self.is_behind, "an event")

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or self._device.stream
        stream.clock.join(self._device.schedule.host.clock)
        self._device.schedule.host.tick()
        if stream.is_busy:
            self.is_behind = True
            stream.marks.append(self)
        else:
            self.clock = Clock(stream.clock)

    def query(self) -> bool:
        over = not self.is_behind and self._device.schedule.random.random() < 0.5
        if over:
            self._device.schedule.host.clock.join(self.clock)
        return over

    def synchronize(self) -> None:
        self._device.schedule.point()
        self._device.waits_in_capture("an event")
        self.await_record()
        self._device.schedule.host.clock.join(self.clock)

    def elapsed_time(self, end: Event) -> float:
        assert self._timed
        return self._device.schedule.random.random()


class Graph:
    """Stands in for torch.cuda.CUDAGraph."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.operations: list[tuple[str, list[Access], Action | None]] = []
        self._pool = 0
        self._stream: Stream | None = None

    def capture_begin(self, pool: int, capture_error_mode: str) -> None:
        assert capture_error_mode == "thread_local", "other threads may not allocate meanwhile"
        device, stream = self._device, self._device.stream
        device.schedule.point()
        if stream is device.default_stream or stream.capturing is not None:
            device.memory.fault(f"a capture begins on {stream.name}, which may not capture now")
        if device.pools.get(pool, 1) == 0:
            device.memory.fault("a capture into a pool that was closed with its last graph")
        if any(other.capturing is not None for other in device.streams):
            device.memory.fault("two threads capture into one pool")
        device.pools[pool] = device.pools.get(pool, 0) + 1
        self._pool, self._stream, stream.capturing = pool, stream, self

    def capture_end(self) -> None:
        assert self._stream is not None
        self._device.schedule.point()
        self._stream.capturing = None

    def replay(self) -> None:
        for what, accesses, action in self.operations:
            self._device.run(f"replayed {what}", accesses, action=action)

    def __del__(self) -> None:
        if self._stream is not None:
            device = self._stream._device
            device.pools[self._pool] -= 1
            if device.rules.drops_work_spaces:
                for key in [key for key in device.work_spaces if key[1] is self._stream]:
                    del device.work_spaces[key]


class Here:
    """Stands for the device of the engine whose thread runs."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule

    def __getattr__(self, name: str) -> Any:
        return getattr(self._schedule.host.device, name)


class Device:
    """One device. mapped: yields for a range the name of each chunk that lies there, or None. mappings: yields the names of what
    maps them. beside: another device, with which it has the memory in common. prefix: of the names of its streams and threads."""

    def __init__(
        self,
        schedule: Schedule,
        rules: Rules,
        mapped: Callable[[int, int], Iterable[Hashable | None]],
        mappings: Callable[[int, int], Iterable[Hashable]],
        beside: Device | None = None,
        prefix: str = "",
    ) -> None:
        self.schedule, self.rules, self._mapped, self._mappings, self.prefix = schedule, rules, mapped, mappings, prefix
        self.memory = Memory() if beside is None else beside.memory
        self.default_stream = Stream(self, f"{prefix}default stream")
        self.streams = [Stream(self, f"{prefix}stream {number}") for number in range(NUM_STREAMS)]
        self._num_streams_given = 0
        self._free: dict[tuple[int | None, Stream, Hashable], list[Block]] = {}
        self._blocks: list[Block] = []  # by their addresses
        self.pools: dict[int, int] = {}  # the graphs of each
        self.work_spaces: dict[tuple[int, Stream], Storage] = {}
        self._handles: list[int] = []  # of threads that have ended
        self._num_handles = 0
        self.refuses = 0  # how many allocations are refused from now on
        self.counts: Counter[str] = Counter()  # operations of each name
        self.registered: list[tuple[int, int]] = []  # the driver's: (address, bytes) of host memory

    # ---- streams

    @property
    def stream(self) -> Stream:
        streams = self.schedule.host.streams
        return streams[-1] if streams else self.default_stream

    def stream_named(self, handle: str) -> Stream:
        """Returns the stream that the driver knows by this handle."""
        return next(one for one in (self.default_stream, *self.streams) if one.cuda_stream == handle)

    def new_stream(self) -> Stream:
        self._num_streams_given += 1
        return self.streams[(self._num_streams_given - 1) % NUM_STREAMS]

    def waits_in_capture(self, what: str) -> None:
        if self.stream.capturing is not None:
            self.memory.fault(f"{self.schedule.host.name} waits for {what} while it captures")

    def empty_cache(self) -> None:
        if any(stream.capturing is not None for stream in self.streams):
            self.memory.fault("torch gives memory back while a thread captures")
        for key in [key for key in self._free if key[0] is None]:
            del self._free[key]

    # ---- memory

    def allocate(self, size: Hashable, what: str) -> Storage:
        """Returns a block for the current stream, from the pool of the graph it captures. Raises torch.OutOfMemoryError."""
        if self.refuses:
            self.refuses -= 1
            raise torch.OutOfMemoryError("CUDA out of memory.")
        stream = self.stream
        pool = None if stream.capturing is None else stream.capturing._pool
        known = self._free.get((pool, stream, size))
        if known:
            block = known.pop()
        else:
            block = Block(pool, stream, size, address=FIRST_ADDRESS + len(self._blocks) * ADDRESS_STEP)
            self._blocks.append(block)
        block.what, block.number, block.is_free = what, block.number + 1, False
        return Storage(self, block)

    def place_of(self, address: int, num_bytes: int) -> Any:
        """Returns the place that a copy of the driver accesses."""
        if address < FIRST_ADDRESS:
            return address, num_bytes
        block = self._blocks[(address - FIRST_ADDRESS) // ADDRESS_STEP]
        return block, block.number

    def is_registered(self, address: int, num_bytes: int) -> bool:
        return any(begin <= address and address + num_bytes <= begin + size for begin, size in self.registered)

    def page_locked(self) -> Storage:
        """Returns page-locked memory of the host."""
        return Storage(self, Block(PAGE_LOCKED, self.default_stream, None, "page-locked memory"))

    def free(self, block: Block) -> None:
        block.is_free = True
        if block.pool == PAGE_LOCKED:
            return
        self._free.setdefault((block.pool, block.stream, block.size), []).append(block)

    # ---- operations

    def launch(self, what: str, accesses: list[Access], action: Action | None = None, stream: Stream | None = None) -> None:
        """Runs an operation on a stream, the current one if none is given, or records it in the graph that is captured there."""
        self.schedule.point()
        graph = (stream or self.stream).capturing
        if graph is not None:
            graph.operations.append((what, accesses, action))
        else:
            self.run(what, accesses, stream, action)

    def run(self, what: str, accesses: list[Access], stream: Stream | None = None, action: Action | None = None) -> None:
        stream, host = stream or self.stream, self.schedule.host
        if stream.is_busy or action is not None:
            stream.begin(action is not None)
        try:
            self.counts[what] += 1
            stream.clock.join(host.clock)
            host.tick()
            stream.clock[stream.name] = stream.clock.get(stream.name, 0) + 1
            self._access(what, accesses, stream)
            if action is not None:
                action(stream)
        finally:
            if action is not None:
                stream.end()

    def _access(self, what: str, accesses: list[Access], stream: Stream) -> None:
        for place, writes in accesses:
            note = self.memory.write if writes else self.memory.read
            for name, kind in self._names(place, what):
                note(name, kind, stream.name, stream.clock, what)
            if isinstance(place, tuple) and isinstance(place[0], int):
                for name in self._mappings(*place):
                    self.memory.read(name, "a mapping", stream.name, stream.clock, what)

    def host_reads(self, name: Hashable, kind: str, what: str) -> None:
        host = self.schedule.host
        self.memory.read(name, kind, host.name, host.clock, what)

    def host_uses(self, name: Hashable, kind: str, what: str) -> None:
        """Notes that the thread that runs reads and writes a piece of memory."""
        host = self.schedule.host
        self.memory.write(name, kind, host.name, host.clock, what)

    def _names(self, place: Any, what: str) -> Iterator[tuple[Hashable, str]]:
        """Yields the name of each piece of memory that a place stands for now, and what kind of memory it is."""
        if place in ("kv", "adapters", "masks"):
            for own, _ in getattr(self.schedule.host, place):
                yield from self._names(own, what)
        elif isinstance(place, tuple) and isinstance(place[0], Block):
            block, number = place
            if block.pool is None and (block.is_free or block.number != number):
                self.memory.fault(f"{what} uses {block.what} that was given back")
            yield block, block.what
        elif isinstance(place, tuple):
            for name in self._mapped(*place):
                if name is None:
                    self.memory.fault(f"{what} uses an address without memory")
                else:
                    yield name, "a chunk"
        else:
            yield place, getattr(place, "kind", "host memory")

    # ---- libraries

    def product(self, what: str, accesses: list[Access]) -> None:
        """A matrix product by cuBLAS, which writes to its work space."""
        host, stream = self.schedule.host, self.stream
        if host.handle is None:
            if stream.capturing is not None:
                self.memory.fault("a cuBLAS handle is made within a capture")
            if self._handles:
                host.handle = self._handles.pop()
            else:
                host.handle = self._num_handles
                self._num_handles += 1
        work_space = self.work_spaces.get((host.handle, stream))
        if work_space is None:
            work_space = self.work_spaces[host.handle, stream] = self.allocate("work space", "cuBLAS's work space")
        self.launch(what, [*accesses, ((work_space.block, work_space.block.number), True)])

    def thread_ended(self, host: Host) -> None:
        if host.handle is not None:
            self._handles.append(host.handle)

    def draw(self) -> None:
        """A draw from the default generator."""
        captures = any(stream.capturing is not None for stream in self.streams)
        if self.rules.one_generator_state and captures and self.stream.capturing is None:
            self.memory.fault("Offset increment outside graph capture encountered unexpectedly.")
