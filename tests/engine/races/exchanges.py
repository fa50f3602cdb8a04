"""Stand-ins for what carries exchanges between the devices of a group out: NCCL's library, and the kernel of small sums.

The kernel is the text of engine/cuda/kernels/triton_peers.py, with a Triton that notes the accesses to the ranks' regions instead
of computing. What it tells other ranks hands a clock over, and what it has waited for is known afterwards.
"""

from __future__ import annotations

import ctypes
import os
import re
import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from engine.cuda.kernels import triton_peers
from tests.engine.races.clocks import Clock
from tests.engine.races.device import Here, Named, Stream
from tests.engine.races.schedule import Schedule
from tests.engine.races.tensors import Tensor, reads, writes

MOST_SUMMED_BYTES = 128  # of a tensor whose sum does not go through NCCL: 4 rows

# ---- NCCL

ITEM_BYTES = {1: 1, 2: 4, 6: 2, 7: 4, 9: 2}  # by NCCL's numbers of types
SYSTEM_ERROR = 2


@dataclass(slots=True, eq=False)
class _Meeting:
    """One exchange of a connection: by rank, what it is there, what was known when it began, and the value of what is exchanged."""

    begun: dict[int, tuple[str, Clock, float]] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class _Rank:
    """One rank's side of a connection. number: of its exchanges so far. graphs: those that hold some."""

    connection: _Connection
    rank: int
    number: int = 0
    is_aborted: bool = False
    graphs: list[Any] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Connection:
    size: int
    clock: Clock = field(default_factory=Clock)
    ranks: dict[int, _Rank] = field(default_factory=dict)
    meetings: dict[int, _Meeting] = field(default_factory=dict)


class Library:
    """NCCL's library. An exchange ends once all ranks of its connection have come to it, in the order of each rank's stream, and
    then each knows what all knew when they began; or once its rank has aborted."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule, self._on = schedule, Here(schedule)
        self._connections: dict[bytes, _Connection] = {}
        self._ranks: dict[int, _Rank] = {}
        for name in ("GetVersion", "GetUniqueId", "CommInitRank", "CommAbort", "AllReduce", "AllGather", "Broadcast"):
            setattr(self, f"nccl{name}", _Function(getattr(self, f"_{name}")))
        self.ncclGetErrorString: Any = _Function(lambda code: b"system error")

    def _GetVersion(self, code: Any) -> int:
        code._obj.value = 23203
        return 0

    def _GetUniqueId(self, made: Any) -> int:
        number = len(self._connections) + 1
        ctypes.memmove(made, number.to_bytes(8, "little"), 8)
        self._connections[bytes(made._obj)] = _Connection(0)
        return 0

    def _CommInitRank(self, made: Any, size: int, group_id: Any, rank: int) -> int:
        connection = self._connections[bytes(group_id)]
        own = connection.ranks[rank] = _Rank(connection, rank)
        connection.size = size
        connection.clock.join(self._schedule.host.clock)
        self._schedule.host.tick()
        if not self._schedule.wait(lambda: len(connection.ranks) == size, "the other ranks to connect", is_limited=True):
            own.is_aborted = True
            return SYSTEM_ERROR
        self._schedule.host.clock.join(connection.clock)
        made._obj.value = len(self._ranks) + 1
        self._ranks[made._obj.value] = own
        return 0

    def _CommAbort(self, communicator: Any) -> int:
        own = self._ranks[communicator.value]
        own.is_aborted = True
        self._schedule.wait(lambda: not any(graph() is not None for graph in own.graphs), "the end of graphs with exchanges")
        return 0

    def _AllReduce(self, source: int, target: int, count: int, kind: int, _: int, communicator: Any, stream: str) -> int:
        return self._exchange("sum", source, target, count * ITEM_BYTES[kind], 1, communicator, stream)

    def _Broadcast(self, source: int, target: int, count: int, kind: int, _: int, communicator: Any, stream: str) -> int:
        return self._exchange("broadcast", source, target, count * ITEM_BYTES[kind], 1, communicator, stream)

    def _AllGather(self, source: int, target: int, count: int, kind: int, communicator: Any, stream: str) -> int:
        return self._exchange("gather", source, target, count * ITEM_BYTES[kind], 0, communicator, stream)

    def _exchange(self, what: str, source: int, target: int, num_bytes: int, parts: int, communicator: Any, stream: str) -> int:
        own, device = self._ranks[communicator.value], self._schedule.host.device
        if own.is_aborted:
            device.memory.fault(f"{what} on a connection that was given up")
            return 0
        found = device.stream_named(stream)
        buffers = Named(communicator.value, "NCCL's buffers")
        places = [
            (device.place_of(source, num_bytes), False),
            (device.place_of(target, num_bytes * (parts or own.connection.size)), True),
        ]
        if found.capturing is not None:
            own.graphs.append(weakref.ref(found.capturing))
        (block, _), _ = places[1]

        def meet(stream: Stream) -> None:
            block.value = self._meet(own, f"{what} of {num_bytes} bytes", stream, block.value)

        device.launch(what, [*places, (buffers, True)], meet, found)
        return 0

    def _meet(self, own: _Rank, what: str, stream: Stream, value: float) -> float:
        """Waits for the other ranks. Returns the sum of their values."""
        connection, number = own.connection, own.number
        own.number += 1
        meeting = connection.meetings.setdefault(number, _Meeting())
        meeting.begun[own.rank] = what, stream.told(), value
        self._schedule.wait(
            lambda: len(meeting.begun) == connection.size or own.is_aborted, f"a {what} (the {number + 1}th of its connection)"
        )
        if len(meeting.begun) < connection.size:
            return value
        if len(kinds := {kind for kind, _, _ in meeting.begun.values()}) > 1:
            stream._device.memory.fault(f"ranks of a group meet in different exchanges: {', '.join(sorted(kinds))}")
        for _, clock, _ in meeting.begun.values():
            stream.clock.join(clock)
        return sum(one for _, _, one in meeting.begun.values())


class _Function:
    """A function of the library, which takes attributes as those of ctypes do."""

    argtypes: Any = ()
    restype: Any = None

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *arguments: Any) -> Any:
        return self._function(*arguments)


# ---- descriptors


class Swaps:
    """Makes what stands in for engine.memory.peer_handles.PeerHandles, of all groups."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule, self.given = schedule, dict[bytes, dict[int, int]]()
        self.clocks: dict[bytes, Clock] = {}

    def __call__(self, group_id: bytes, rank: int, size: int) -> _Swap:
        return _Swap(self, group_id, rank, size)

    def close(self) -> None:
        for given in self.given.values():
            for handle in given.values():
                os.close(handle)
        self.given.clear()


class _Swap:
    def __init__(self, swaps: Swaps, group_id: bytes, rank: int, size: int) -> None:
        self._swaps, self._group_id, self._rank, self._size = swaps, group_id, rank, size

    def swap(self, handle: int, num_bytes: int) -> dict[int, int]:
        given, clock = self._swaps.given.setdefault(self._group_id, {}), self._swaps.clocks.setdefault(self._group_id, Clock())
        given[self._rank] = os.dup(handle)
        host = self._swaps.schedule.host
        clock.join(host.clock)
        host.tick()
        if not self._swaps.schedule.wait(lambda: len(given) == self._size, "the others' descriptors", is_limited=True):
            raise TimeoutError("timed out")
        host.clock.join(clock)
        return {rank: os.dup(other) for rank, other in given.items() if rank != self._rank}

    def close(self) -> None:
        """Does nothing."""


class Word:
    """Stands in for a tensor of one number in page-locked memory, which the host writes and kernels read from time to time."""

    def __init__(self) -> None:
        self.value = 0

    def __getitem__(self, at: int) -> int:
        return self.value

    def __setitem__(self, at: int, value: int) -> None:
        self.value = value


# ---- the kernel of small sums


class _Number(int):
    """A number of a kernel."""

    def to(self, dtype: Any) -> _Number:
        return self

    def __add__(self, other: int) -> Any:
        return other + int(self) if isinstance(other, _Places) else _Number(int(self) + int(other))

    def __sub__(self, other: int) -> _Number:
        return _Number(int(self) - int(other))

    def __mul__(self, other: int) -> _Number:
        return _Number(int(self) * int(other))

    def __mod__(self, other: int) -> _Number:
        return _Number(int(self) % int(other))

    __radd__, __rmul__ = __add__, __mul__


class _Places:
    """Numbers from one on, or the values of a vector."""

    def __init__(self, first: int = 0, num: int = 1) -> None:
        self.first, self.num = first, num

    def to(self, dtype: Any) -> _Places:
        return self

    def __add__(self, other: Any) -> _Places:
        return _Places(self.first + (other if isinstance(other, int) else 0), self.num)

    __radd__ = __add__

    def __floordiv__(self, other: int) -> _Places:
        return self

    def __lt__(self, other: int) -> bool:
        return True


class _Pointer:
    """An address. num: how many items from there on are meant."""

    def __init__(self, address: int, item_bytes: int, num: int = 1) -> None:
        self.address, self.item_bytes, self.num = address, item_bytes, num
        self.dtype = SimpleNamespace(element_ty=None)

    def to(self, dtype: Any) -> _Pointer:
        return self

    def __add__(self, other: Any) -> _Pointer:
        first, num = (other.first, other.num) if isinstance(other, _Places) else (int(other), self.num)
        return _Pointer(self.address + first * self.item_bytes, self.item_bytes, num)


class PeerMemory:
    """The regions of all ranks. place_of(address): names the place at an address of a region, alike for all that have mapped it;
    None: the address is of no region. numbers: what is there, and what was known when it was stored to tell others. worthless:
    regions of groups of which a rank does not wait any more, whose sums nobody uses."""

    def __init__(self, schedule: Schedule, place_of: Callable[[int], tuple[Hashable, int] | None]) -> None:
        self.schedule, self.place_of = schedule, place_of
        self.numbers: dict[Hashable, tuple[int, Clock]] = {}
        self.worthless: set[Hashable] = set()


@dataclass(slots=True, eq=False)
class _Program:
    """A program of the kernel that runs. regions: those of all ranks. seen: what it has found when it looked last at what others
    tell."""

    lane: int
    stream: Stream
    stop: Word
    regions: set[Hashable]
    seen: list[int] = field(default_factory=list)


class Triton:
    """Stands in for triton.language within the kernel of small sums. Each thread of the host runs one program at a time."""

    constexpr = int64 = int32 = float32 = None

    def __init__(self, memory: PeerMemory) -> None:
        self._memory, self._schedule = memory, memory.schedule
        self._programs: dict[str, _Program] = {}  # by the thread that runs them

    def run(self, kernel: Callable[..., None], program: _Program, *arguments: Any, **constants: Any) -> None:
        self._programs[self._schedule.host.name] = program
        kernel(*arguments, **constants)

    @property
    def _program(self) -> _Program:
        return self._programs[self._schedule.host.name]

    def program_id(self, axis: int) -> _Number:
        return _Number(self._program.lane)

    def arange(self, first: int, end: int) -> _Places:
        return _Places(first, end - first)

    def zeros(self, shape: Any, dtype: Any) -> _Places:
        return _Places()

    def full(self, shape: Any, value: int, dtype: Any) -> int:
        return value

    def static_range(self, num: int) -> list[_Number]:
        return [_Number(number) for number in range(num)]

    def debug_barrier(self) -> None:
        """Does nothing: the threads of a program are one here."""

    def load(self, pointer: Any, **how: Any) -> Any:
        if isinstance(pointer, Word):
            return pointer.value
        place = self._memory.place_of(pointer.address)
        if place is None:  # of the summed tensor, whose accesses are those of the whole operation
            return _Places()
        self._note(place, pointer, is_written=False)
        return _Places() if pointer.num > 1 else _Number(self._memory.numbers.get(place, (0, None))[0])

    def store(self, pointer: _Pointer, value: Any, **how: Any) -> None:
        place = self._memory.place_of(pointer.address)
        if place is None:
            return
        self._note(place, pointer, is_written=True)
        if pointer.num == 1:
            self._memory.numbers[place] = int(value), Clock()

    def inline_asm_elementwise(self, text: str, constraints: str, arguments: list[Any], **how: Any) -> _Number:
        if "st.release.sys" in text:
            first, call, stride, size = arguments
            self._schedule.point()
            told = self._program.stream.told()
            for step in range(size):
                self._memory.numbers[self._memory.place_of(first.address + step * stride)] = int(call), told
            return _Number(0)
        assert "ld.acquire.sys" in text, "the kernel tells and waits in another way"
        first, size = arguments
        program, places = self._program, [self._memory.place_of(first.address + 8 * rank) for rank in range(size)]
        numbers = self._memory.numbers

        def now() -> list[int]:
            return [numbers[place][0] if place in numbers else 0 for place in places]

        self._look_at_stop()
        self._schedule.wait(lambda: bool(program.stop.value) or now() != program.seen, "what other ranks tell of a sum")
        program.seen = now()
        for place in places:
            if place in numbers:
                program.stream.clock.join(numbers[place][1])
        return _Number(min(program.seen))

    def _look_at_stop(self) -> None:
        if self._program.stop.value:
            self._memory.worthless |= self._program.regions

    def _note(self, place: tuple[Hashable, int], pointer: _Pointer, is_written: bool) -> None:
        self._look_at_stop()
        if place[0] in self._memory.worthless:
            return
        stream, memory = self._program.stream, self._schedule.host.device.memory
        kind = "a buffer of a region" if pointer.num > 1 else "a region's count of calls"
        (memory.write if is_written else memory.read)(place, kind, stream.name, stream.clock, "a sum of ranks")


def sums_of_ranks(memory: PeerMemory, fault: tuple[str, str] = ("", "")) -> SimpleNamespace:
    """Returns what stands in for engine.cuda.kernels.triton_peers. fault: a part of its text, and what stands there instead."""
    text, (old, new) = Path(triton_peers.__file__).read_text(), fault
    assert not old or text.count(old) == 1
    names: dict[str, Any] = {"__name__": triton_peers.__name__}
    exec(compile(re.sub(r"^@triton\.jit.*$", "", text.replace(old, new) if old else text, flags=re.M), "<sums>", "exec"), names)
    names["tl"] = language = Triton(memory)
    kernel, on = names["_sum_kernel"], Here(memory.schedule)

    def launched(grid: tuple[int]) -> Callable[..., None]:
        def launch(x: Tensor, words: Tensor, buffers: Tensor, stop: Word, *numbers: int, **constants: Any) -> None:
            del constants["num_warps"]
            pointers = [_Pointer(each.data_ptr(), each.dtype.itemsize) for each in (x, words, buffers)]

            def run(stream: Stream) -> None:
                size, stride = constants["SIZE"], constants["STRIDE"]
                places = [memory.place_of(pointers[1].address + step * stride) for step in range(size)]
                regions = {place[0] for place in places if place is not None}
                for lane in range(grid[0]):
                    language.run(kernel, _Program(lane, stream, stop, regions), *pointers, stop, *numbers, **constants)

            on.launch("a sum of ranks", [reads(x), reads(words), writes(x)], run)

        return launch

    names["_sum_kernel"] = _Grid(launched)
    names |= {"MOST_BYTES": MOST_SUMMED_BYTES, "LOOKS": 1}
    return SimpleNamespace(**names)


class _Grid:
    def __init__(self, launched: Callable[[tuple[int]], Callable[..., None]]) -> None:
        self._launched = launched

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        return self._launched(grid)
