"""What connects ranks on GPUs: how they meet, what they exchange, and how exchanges end; with stand-ins for NCCL."""

from __future__ import annotations

import ctypes
import socket
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.contracts.ranks import GroupBroken
from engine.cuda import backend, begins, connecting, link, nccl
from engine.cuda.backend import CudaBackend
from engine.cuda.begins import DeviceBegins
from engine.cuda.collectives import ID_BYTES
from engine.cuda.ranks import DeviceRanks, connect
from engine.cuda.share import CudaShare, ShareLinks
from engine.host import step_begins
from engine.host.rank_memory import LINE_BYTES
from engine.host.rendezvous import Rendezvous, rendezvous_words
from engine.host.step_begins import StepBegins

CPU = torch.device("cpu")


class NoThread:
    """Stands in for a thread for which there is no memory."""

    def __init__(self, **_: Any) -> None:
        pass

    def start(self) -> None:
        raise MemoryError("thread group: no memory")


class Halves:
    """Stands in for the Collectives of rank 0 of two, whose other rank has the same tensors times `factor`."""

    def __init__(self, factor: float = 2.0) -> None:
        self.factor = factor
        self.calls: list[str] = []
        self.blocked: Callable[[], None] = lambda: None

    def join(self, agreed: Callable[[bool], bool]) -> None:
        self.calls.append("join")

    def sum(self, x: Tensor) -> None:
        self.calls.append("sum")
        self.blocked()
        x.mul_(1.0 + self.factor)

    def share_first(self, x: Tensor) -> None:
        self.calls.append("first")

    def gather(self, part: Tensor, out: Tensor) -> None:
        self.calls.append("gather")
        out[0], out[1] = part, part * self.factor

    def abort(self) -> None:
        self.calls.append("abort")

    def release(self) -> None:
        self.calls.append("release")


def ranks_of(halves: Halves) -> tuple[DeviceRanks, Any]:
    broken = np.zeros(1, np.int64)
    return DeviceRanks(halves, 0, 2, broken), broken


def until(done: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 10.0
    while not done():
        assert time.monotonic() < deadline_s
        time.sleep(1e-3)


def test_parts_are_gathered_side_by_side() -> None:
    ranks, _ = ranks_of(Halves())
    part = torch.arange(6.0).view(3, 2)
    assert torch.equal(ranks.gather(part), torch.cat((part, 2 * part), 1))
    ranks.close()


def test_nothing_is_exchanged_alone() -> None:
    halves = Halves()
    ranks, _ = ranks_of(halves)
    x = torch.ones(2, 3)
    with ranks.alone(), ranks.alone():
        ranks.sum(x)
        ranks.share_first(x)
        assert ranks.gather(x).shape == (2, 6)
    assert (halves.calls, x.sum().item()) == ([], 6.0)
    ranks.sum(x)
    assert (halves.calls, x.sum().item()) == (["sum"], 18.0)
    ranks.close()


def test_a_connection_that_is_not_given_up_costs_nobody_else(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its thread alone uses what it has still to free."""
    monkeypatch.setattr("engine.cuda.link.CLOSE_LIMIT_S", 0.02)
    halves, hangs = Halves(), threading.Event()
    monkeypatch.setattr(halves, "abort", lambda: hangs.wait(10.0))
    ranks, _ = ranks_of(halves)
    ranks.close()
    ranks.wait_closed()
    assert "not given up" in caplog.text
    hangs.set()
    ranks.wait_closed()


def test_a_broken_group_ends_exchanges_once_and_launches_no_others() -> None:
    halves = Halves()
    ranks, broken = ranks_of(halves)
    broken[0] = 1
    until(lambda: halves.calls == ["abort", "release"])
    for refused in (ranks.check, lambda: ranks.sum(torch.ones(1, 1)), lambda: ranks.gather(torch.ones(1, 1))):
        with pytest.raises(GroupBroken):
            refused()
    with pytest.raises(GroupBroken), ranks.launching():
        pytest.fail("a graph may not be replayed")
    ranks.close()
    ranks.wait_closed()
    assert halves.calls == ["abort", "release"]


def test_an_exchange_that_waits_on_the_host_is_aborted_under_it() -> None:
    """Then the thread that waits goes on, although it holds what launches hold."""
    halves = Halves()
    halves.blocked = lambda: until(lambda: "abort" in halves.calls)
    ranks, broken = ranks_of(halves)
    waiting = threading.Thread(target=lambda: ranks.sum(torch.ones(1, 1)))
    waiting.start()
    until(lambda: halves.calls == ["sum"])
    broken[0] = 1
    waiting.join(10.0)
    assert not waiting.is_alive()
    until(lambda: halves.calls == ["sum", "abort", "release"])


def test_memory_is_given_up_after_a_launch_that_was_late() -> None:
    """A thread may be held up between its look at the group and the launch for longer than an abort waits for it."""
    halves, go_on = Halves(), threading.Event()

    def launch_late() -> None:
        go_on.wait(10.0)
        halves.calls.append("launched")

    halves.blocked = launch_late
    ranks, broken = ranks_of(halves)
    late = threading.Thread(target=lambda: ranks.sum(torch.ones(1, 1)))
    late.start()
    until(lambda: halves.calls == ["sum"])
    broken[0] = 1
    until(lambda: halves.calls == ["sum", "abort"])
    time.sleep(0.05)
    assert halves.calls == ["sum", "abort"]
    go_on.set()
    late.join(10.0)
    until(lambda: halves.calls == ["sum", "abort", "launched", "release"])


def test_an_abort_that_waits_for_graphs_holds_up_nobody() -> None:
    """NCCL gives a communicator up when the graphs that use it are destroyed, which is done by the thread that runs steps."""
    halves, destroyed = Halves(), threading.Event()
    abort = halves.abort
    halves.abort = lambda: (abort(), destroyed.wait(10.0))  # type: ignore[method-assign, assignment, func-returns-value]
    ranks, broken = ranks_of(halves)
    broken[0] = 1
    until(lambda: halves.calls == ["abort"])
    with pytest.raises(GroupBroken):
        ranks.sum(torch.ones(1, 1))
    ranks.close()
    destroyed.set()
    ranks.wait_closed()


class Fence:
    """Stands in for an EventFence: it has passed once `passed` is set. Each is noted in `made`."""

    made: list[Fence]

    def __init__(self, stream: Any) -> None:
        self.passed = threading.Event()
        if stream == "idle":
            self.passed.set()
        self.made.append(self)

    def done(self) -> bool:
        return self.passed.is_set()

    def wait(self) -> None:
        assert self.passed.wait(10.0)


def test_a_rank_begins_a_step_when_its_device_has_ended_what_was_launched_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launch comes earlier if the device runs another model's step by then."""
    clock_ns, stream = [10**9], ["idle"]
    Fence.made = []
    monkeypatch.setattr(begins, "EventFence", Fence)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream[0])
    monkeypatch.setattr(step_begins.time, "monotonic_ns", lambda: clock_ns[0])
    memory = np.zeros(2 * LINE_BYTES, np.uint8)
    first, other = (DeviceBegins(StepBegins(memory, rank, 2), rank == 0, True) for rank in range(2))
    assert first.waited_s(0.25) == 0.0, "nothing was told yet"
    other.note()
    clock_ns[0] += 750_000_000  # the first rank's step began at 1.25 s, after the other one's
    assert first.waited_s(0.5) == 0.0
    assert first.waited_s(1.0) == 0.25, "it began at 0.75 s, and the other one at 1 s"
    stream[0] = "busy"
    other.note()
    clock_ns[0] += 2_000_000_000
    assert first.waited_s(2.5) == 0.0, "the other device has not begun, as far as it has told"
    Fence.made[-1].passed.set()
    until(lambda: first.waited_s(2.5) > 0.0)
    assert first.waited_s(2.5) == 2.5
    clock_ns[0] += 500_000_000
    assert first.waited_s(2.5) == 2.0
    other.close()
    other.wait_closed()
    assert first._thread is None, "nobody notes when the first rank begins"


def test_an_error_that_ends_what_notes_begins_is_raised_in_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    Fence.made = []
    monkeypatch.setattr(begins, "EventFence", Fence)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "busy")
    other = DeviceBegins(StepBegins(np.zeros(2 * LINE_BYTES, np.uint8), 1, 2), False, True)
    links = ShareLinks(None, None, np.zeros(1, np.int64), other)

    def wait(fence: Fence) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(Fence, "wait", wait)
    links.check()
    other.note()
    other.wait_closed()
    for met in (links.check, links.has_ended):
        with pytest.raises(RuntimeError, match="an illegal memory access"):
            met()


def test_a_connection_is_given_up_whatever_its_abort_raises(caplog: pytest.LogCaptureFixture) -> None:
    halves = Halves()

    def abort() -> None:
        halves.calls.append("abort")
        raise OSError("the library is gone")

    halves.abort = abort  # type: ignore[method-assign]
    ranks, _ = ranks_of(halves)
    ranks.close()
    ranks.wait_closed()
    assert halves.calls == ["abort", "release"]
    assert "rank 0 of 2: the library is gone" in caplog.text


@pytest.mark.parametrize("answer", [True, False, RuntimeError("CUDA error: an illegal memory access was encountered")])
def test_a_share_asks_its_device_whether_its_steps_have_ended(answer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def query() -> bool:
        if isinstance(answer, bool):
            return answer
        raise answer

    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(query=query))
    follower: Any = SimpleNamespace(_device=torch.device("cuda"), _links=ShareLinks(None, None, np.zeros(1, np.int64)))
    if isinstance(answer, bool):
        assert CudaShare.has_ended(follower) == answer
    else:
        with pytest.raises(RuntimeError, match="an illegal memory access"):
            CudaShare.has_ended(follower)


class Meeting:
    """Stands in for a Rendezvous."""

    def meet(self, new_id: Callable[[], bytes]) -> bytes:
        return new_id()


def connected(halves: Halves) -> DeviceRanks:
    connects = SimpleNamespace(new_id=lambda: bytes(ID_BYTES), connect=lambda group_id, rank, size: halves)
    meeting: Any = Meeting()
    return connect(connects, meeting, 0, 2, np.zeros(1, np.int64), CPU)


def test_each_kind_of_exchange_is_tried_before_the_first_step() -> None:
    halves = Halves()
    connected(halves).close()
    assert halves.calls[:4] == ["first", "sum", "gather", "join"]
    wrong = Halves(factor=3.0)
    with pytest.raises(RuntimeError, match="rank 0 of 2: an exchange between the group's devices gave wrong numbers"):
        connected(wrong)
    until(lambda: wrong.calls[-2:] == ["abort", "release"])


def test_ranks_meet_and_get_the_id_of_the_first() -> None:
    words, broken = np.zeros(rendezvous_words(3), np.int64), np.zeros(1, np.int64)
    found: dict[int, bytes | None] = {}

    def meet(rank: int) -> None:
        found[rank] = Rendezvous(words, rank, broken).meet(lambda: bytes([rank + 1]) * ID_BYTES)

    threads = [threading.Thread(target=meet, args=(rank,)) for rank in (0, 2, 1)]
    for number, thread in enumerate(threads):
        thread.start()
        if number < 2:
            time.sleep(0.02)
            assert not found, "a rank does not wait for the others"
    for thread in threads:
        thread.join(10.0)
    assert found == dict.fromkeys(range(3), b"\1" * ID_BYTES)


@pytest.mark.parametrize("rank", [0, 1])
def test_nobody_waits_for_a_rank_that_will_not_come(rank: int) -> None:
    words, broken = np.zeros(rendezvous_words(2), np.int64), np.zeros(1, np.int64)
    found: list[bytes | None] = []
    waiting = threading.Thread(target=lambda: found.append(Rendezvous(words, rank, broken).meet(lambda: bytes(ID_BYTES))))
    waiting.start()
    time.sleep(0.02)
    assert waiting.is_alive()
    broken[0] = 1
    waiting.join(10.0)
    assert found == [None]


class Waits:
    """Stands in for Connects: `connect` waits for `may_end`, and then connects or raises `error`. ends: whether give_up can end
    that."""

    def __init__(self, error: Exception | None = None, ends: bool = False) -> None:
        self.may_end, self.error, self.ends = threading.Event(), error, ends
        self.made, self.num_given_up = Halves(), 0

    def new_id(self) -> bytes:
        return bytes(ID_BYTES)

    def connect(self, group_id: bytes, rank: int, size: int) -> Halves:
        assert self.may_end.wait(10.0)
        if self.error is not None:
            raise self.error
        return self.made

    def give_up(self) -> None:
        self.num_given_up += 1
        if self.ends:
            self.may_end.set()


def test_a_rank_whose_group_breaks_while_it_connects_waits_no_longer() -> None:
    """What it connects to later is given up."""
    connects, broken = Waits(), np.ones(1, np.int64)
    with pytest.raises(GroupBroken, match="rank 1 of 2: the group has lost a device while its ranks connected"):
        connect(connects, cast(Any, Meeting()), 1, 2, broken, CPU)
    assert (connects.num_given_up, connects.made.calls) == (1, [])
    connects.may_end.set()
    until(lambda: connects.made.calls == ["abort", "release"])


def test_ranks_that_never_connect_meet_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connecting, "CONNECT_LIMIT_S", 0.0)
    connects = Waits(RuntimeError("sockets were shut down"), ends=True)
    with pytest.raises(RuntimeError, match="rank 0 of 2: the group's devices have not connected within 0 s"):
        connect(connects, cast(Any, Meeting()), 0, 2, np.zeros(1, np.int64), CPU)
    assert connects.num_given_up == 1


def test_an_error_while_ranks_connect_is_that_of_the_load() -> None:
    connects = Waits(nccl.NcclError("ncclCommInitRank: unhandled system error"))
    connects.may_end.set()
    with pytest.raises(nccl.NcclError, match="ncclCommInitRank: unhandled system error"):
        connect(connects, cast(Any, Meeting()), 0, 2, np.zeros(1, np.int64), CPU)
    assert connects.num_given_up == 0


class Function:
    """Stands in for a function of a C library: notes what it is given, converted as ctypes would, and returns `code`."""

    def __init__(self, code: Any = 0, fill: Callable[..., None] = lambda *given: None) -> None:
        self.code, self.fill, self.given = code, fill, list[tuple[Any, ...]]()
        self.argtypes: tuple[Any, ...] = ()
        self.restype: Any = None

    def __call__(self, *given: Any) -> Any:
        assert len(given) == len(self.argtypes)
        for value, kind in zip(given, self.argtypes, strict=True):
            kind.from_param(value)  # raises for what the function does not take
        self.fill(*given)
        self.given.append(given)
        return self.code


class Library(SimpleNamespace):
    """Stands in for libnccl. Its communicators have the address 77."""

    def __init__(self) -> None:
        names = ("ncclCommAbort", "ncclAllReduce", "ncclAllGather", "ncclBroadcast")
        super().__init__(**{name: Function() for name in names})
        self.ncclGetVersion = Function(fill=lambda code: setattr(code._obj, "value", 22907))
        self.ncclGetUniqueId = Function(fill=lambda group_id: setattr(group_id._obj, "internal", b"an id"))
        self.ncclCommInitRank = Function(fill=lambda made, *_: setattr(made._obj, "value", 77))
        self.ncclGetErrorString = Function(b"unhandled system error")


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=55))
    return Library()


def test_nccl_is_given_addresses_counts_types_and_the_stream(library: Library) -> None:
    calls = nccl.Nccl(library)
    assert calls.version() == (2, 29, 7)
    assert calls.new_id() == b"an id".ljust(ID_BYTES, b"\0")
    group = calls.connect(b"an id".ljust(ID_BYTES, b"\0"), 1, 4)
    _, size, group_id, rank = library.ncclCommInitRank.given[0]
    assert (size, group_id.internal, rank) == (4, b"an id", 1)
    x, out = torch.zeros(3, 5, dtype=torch.bfloat16), torch.zeros(4, 3, 5, dtype=torch.bfloat16)
    group.sum(x)
    group.share_first(x.float())
    group.gather(x, out)
    group.abort()

    def given(name: str) -> list[Any]:
        return [value.value if isinstance(value, ctypes.c_void_p) else value for value in getattr(library, name).given[0]]

    assert given("ncclAllReduce") == [x.data_ptr(), x.data_ptr(), 15, 9, 0, 77, 55]
    assert given("ncclBroadcast")[2:] == [15, 7, 0, 77, 55]
    assert given("ncclAllGather") == [x.data_ptr(), out.data_ptr(), 15, 9, 77, 55]
    assert given("ncclCommAbort") == [77]


def test_a_wait_of_nccl_for_a_rank_that_is_gone_is_ended_at_its_socket(library: Library) -> None:
    """NCCL asks again and again whether a rank has come to a socket that waits for it without blocking. Other sockets stay."""
    calls, ended, others = nccl.Nccl(library), list[str](), [socket.create_server(("127.0.0.1", 0)), *socket.socketpair()]
    opened: list[socket.socket] = []

    def wait_for_ranks(*_: object) -> None:
        own = socket.create_server(("127.0.0.1", 0))
        own.setblocking(False)
        opened.append(own)
        while library.ncclCommInitRank.code == 0:
            try:
                own.accept()
            except BlockingIOError:
                time.sleep(1e-3)
            except OSError:
                library.ncclCommInitRank.code = 2

    def connects() -> None:
        with pytest.raises(nccl.NcclError, match="ncclCommInitRank: unhandled system error"):
            calls.connect(bytes(ID_BYTES), 1, 2)
        ended.append("connect")

    library.ncclCommInitRank.fill = wait_for_ranks
    waiting = threading.Thread(target=connects)
    waiting.start()
    until(lambda: bool(opened))
    calls.give_up()
    waiting.join(10.0)
    assert ended == ["connect"]
    with socket.create_connection(others[0].getsockname(), 10.0), others[0].accept()[0]:
        others[1].sendall(b"1")
        assert others[2].recv(1) == b"1"
    for each in (*others, *opened):
        each.close()


def test_sockets_that_rank_0_has_opened_for_the_id_count_too(library: Library) -> None:
    opened: list[socket.socket] = []
    library.ncclGetUniqueId.fill = lambda _: opened.append(socket.create_server(("127.0.0.1", 0)))
    calls = nccl.Nccl(library)
    calls.new_id()
    calls.connect(bytes(ID_BYTES), 0, 2)
    calls.give_up()
    with opened[0], pytest.raises(OSError, match="Invalid argument"):
        opened[0].accept()


def test_an_error_of_nccl_names_the_call_and_what_it_says(library: Library) -> None:
    library.ncclCommInitRank.code = 2
    with pytest.raises(
        nccl.NcclError, match=r"ncclCommInitRank: .* error \(2\): under systemd it needs RestrictAddressFamilies=AF_UNIX AF"
    ):
        nccl.Nccl(library).connect(bytes(ID_BYTES), 0, 2)
    library.ncclAllReduce.code = 3
    with pytest.raises(nccl.NcclError, match=r"ncclAllReduce: unhandled system error \(3\); NCCL_DEBUG=INFO tells more"):
        nccl.NcclGroup(nccl.Nccl(library), ctypes.c_void_p(77)).sum(torch.zeros(1))


@pytest.mark.skipif(torch.cuda.is_available(), reason="where there is CUDA there is NCCL")
def test_without_nccl_the_error_says_what_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl, "LIBRARY", "libnccl-that-is-not-there.so.2")
    with pytest.raises(nccl.NcclError, match="models cannot be split over GPUs without NCCL: libnccl-that-is-not-there"):
        nccl.nccl()


def test_without_memory_for_its_thread_a_connection_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    halves = Halves()
    connects: Any = SimpleNamespace(connect=lambda *of_rank: halves, new_id=lambda: bytes(ID_BYTES))
    monkeypatch.setattr(link, "Thread", NoThread)
    with pytest.raises(MemoryError, match="thread group"):
        connect(connects, cast(Any, Meeting()), 0, 2, np.zeros(1, np.int64), CPU)
    assert halves.calls == ["abort", "release"]


def test_ranks_are_given_up_if_the_rest_of_a_share_is_not_connected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else ends their exchanges, nor the thread that watches them."""
    given_up: list[str] = []

    def no_link() -> Any:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(backend, "connect", lambda *_: SimpleNamespace(close=lambda: given_up.append("ranks")))
    of_rank = {"stage_size": 2, "stage_rank": 0, "num_stages": 2, "rendezvous": None, "broken": np.zeros(1, np.int64)}
    region: Any = SimpleNamespace(new_link=no_link, **of_rank)
    memory: Any = SimpleNamespace(arena=torch.zeros(1))
    options: Any = None
    connects: Any = object()
    spec, shape = cast(Any, SimpleNamespace(dtype="float32")), cast(Any, SimpleNamespace(hidden_size=8))
    with pytest.raises(RuntimeError, match="out of memory"):
        CudaBackend(memory, options, connects)._links(spec, shape, region)
    assert given_up == ["ranks"]
