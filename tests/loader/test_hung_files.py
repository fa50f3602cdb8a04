"""Loads from a file system that has stopped to answer: they end once cancelled, and what they leave behind touches nothing."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from queue import SimpleQueue

import numpy as np
import pytest

from loader.errors import ReadFailed
from loader.files import file_calls
from loader.files.file_calls import CallUnderWay, FileCalls, LeftBehind, ReadCancelled, is_local
from loader.reading import file_reader, staging, weight_stream
from loader.reading.sinks import HostSink
from loader.reading.staging import StagingRing
from loader.reading.weight_stream import OpenCheckpoint, open_checkpoint, stream_weights
from loader.sizes.layout import weights_bytes
from tests.loader.checkpoints import LARGE, write_checkpoint

NUM_SLOTS, SLOT_BYTES = 4, 8192
LIMIT_S = 30.0


class Mount:
    """A file system whose calls wait while it hangs. num_waiting: those that do."""

    def __init__(self) -> None:
        self.answers, self._changed, self.num_waiting = threading.Event(), threading.Condition(), 0
        self.answers.set()

    def wait(self) -> None:
        if self.answers.is_set():
            return
        self._count(1)
        assert self.answers.wait(LIMIT_S)
        self._count(-1)

    def _count(self, change: int) -> None:
        with self._changed:
            self.num_waiting += change
            self._changed.notify_all()

    def until_waiting(self, number: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self.num_waiting == number, LIMIT_S)


@pytest.fixture
def mount(monkeypatch: pytest.MonkeyPatch) -> Iterator[Mount]:
    """Yields the file system from which weights are read; it is no drive of this machine."""
    made, preadv = Mount(), os.preadv

    def slow_preadv(fd: int, buffers: list[memoryview], offset: int, flags: int = 0) -> int:
        made.wait()
        return preadv(fd, buffers, offset, flags)

    monkeypatch.setattr(file_reader.os, "preadv", slow_preadv)
    monkeypatch.setattr(file_reader, "is_local", lambda fd: False)
    monkeypatch.setattr(file_reader, "is_cached", lambda *_: True)
    for module in (file_calls, weight_stream):
        monkeypatch.setattr(module, "LEAVE_AFTER_S", 0.05)
        monkeypatch.setattr(module, "LOOK_EVERY_S", 0.01)
    yield made
    made.answers.set()


@pytest.fixture
def source(tmp_path: Path) -> Iterator[OpenCheckpoint]:
    with ExitStack() as stack:
        yield open_checkpoint(write_checkpoint(tmp_path / "m", LARGE, random_bytes=True), "", stack)


class Streaming:
    """A load in a thread of its own."""

    def __init__(self, source: OpenCheckpoint) -> None:
        self.memory = bytearray(weights_bytes(source.shape, "float32"))
        self.ring, self.cancelled, self.done = StagingRing(NUM_SLOTS, SLOT_BYTES), threading.Event(), 0
        self.error: Exception | None = None
        self._source = source
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        def told(done: int, total: int) -> None:
            self.done = done

        try:
            sink = HostSink(memoryview(self.memory))
            stream_weights(self._source, "float32", sink, self.ring, told, self.cancelled.is_set)
        except Exception as error:
            self.error = error

    def has_ended(self, limit_s: float = LIMIT_S) -> bool:
        self._thread.join(limit_s)
        return not self._thread.is_alive()


def readers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("reader")]


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_a_cancelled_load_leaves_reads_behind_that_do_not_return(mount: Mount, source: OpenCheckpoint) -> None:
    mount.answers.clear()
    load = Streaming(source)
    mount.until_waiting(3)
    assert not load.has_ended(0.2), "it waits as long as it is wanted"
    load.cancelled.set()
    assert load.has_ended()
    assert isinstance(load.error, ReadCancelled)
    assert mount.num_waiting == 3
    taken = [load.ring.take() for _ in range(NUM_SLOTS)]  # others go on loading
    for slot in taken:
        slot[:] = b"\x55" * SLOT_BYTES
    load.memory[:] = b"\xaa" * len(load.memory)  # another model's, by now
    mount.answers.set()
    until(lambda: not readers())
    assert load.memory.count(0xAA) == len(load.memory)
    assert all(bytes(slot) == b"\x55" * SLOT_BYTES for slot in taken)


def address(slot: memoryview) -> int:
    return np.frombuffer(slot, np.uint8).ctypes.data


def test_slots_that_stood_in_are_dropped_when_the_lost_ones_come_back() -> None:
    ring = StagingRing(2, SLOT_BYTES)
    own = [ring.take(), ring.take()]
    for slot in own:
        ring.replace(slot)
    in_use, further = ring.take(), ring.take()
    assert not {address(in_use), address(further)} & {address(slot) for slot in own}
    ring.give_back(further)  # as nothing is too many yet
    ring.give_back(own[0])  # in place of the one that is free
    assert ring._free.qsize() == 1
    ring.replace(in_use)  # what stood in is lost, too
    ring.give_back(in_use)
    ring.give_back(own[1])
    assert {address(ring.take()), address(ring.take())} == {address(slot) for slot in own}
    assert ring._free.empty()
    assert ring._num_too_many == 0


def test_a_slot_that_cannot_be_mapped_is_mapped_later(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(*_: object) -> memoryview:
        raise OSError(12, "Cannot allocate memory")

    ring = StagingRing(2, SLOT_BYTES)
    own = [ring.take(), ring.take()]
    monkeypatch.setattr(StagingRing, "_another", none_left)
    for slot in own:
        ring.replace(slot)
    ring.give_back(own[0])  # and needs nothing in its place any more
    assert ring.take() is own[0]
    monkeypatch.undo()
    monkeypatch.setattr(staging, "MAP_AGAIN_S", 0.01)
    further = ring.take()
    assert address(further) not in {address(slot) for slot in own}
    for slot in (own[1], further, own[0]):
        ring.give_back(slot)
    assert {address(ring.take()), address(ring.take())} == {address(slot) for slot in own}
    assert ring._free.empty()


def test_a_load_goes_on_when_the_file_system_answers_again(mount: Mount, source: OpenCheckpoint) -> None:
    wanted = Streaming(source)
    assert wanted.has_ended()
    assert wanted.error is None
    mount.answers.clear()
    load = Streaming(source)
    mount.until_waiting(3)
    mount.answers.set()
    assert load.has_ended()
    assert load.error is None
    assert load.memory == wanted.memory


def test_an_error_of_one_read_does_not_wait_for_others_that_hang(
    mount: Mount, source: OpenCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    hung, numbers = file_reader.os.preadv, iter(range(1000))

    def preadv(fd: int, buffers: list[memoryview], offset: int) -> int:
        if next(numbers) == 2:
            mount.until_waiting(2)
            raise OSError(5, "Input/output error")
        return hung(fd, buffers, offset)

    monkeypatch.setattr(file_reader.os, "preadv", preadv)
    mount.answers.clear()
    load = Streaming(source)
    assert load.has_ended()
    assert isinstance(load.error, ReadFailed)
    assert mount.num_waiting == 2


def test_a_read_straight_into_the_weights_is_waited_for(
    mount: Mount, source: OpenCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The drives of this machine end a read in bounded time. What it writes would land in another model's memory."""
    monkeypatch.setattr(file_reader, "is_local", lambda fd: True)
    mount.answers.clear()
    load = Streaming(source)
    mount.until_waiting(3)
    load.cancelled.set()
    assert not load.has_ended(0.5)
    mount.answers.set()
    assert load.has_ended()
    assert isinstance(load.error, ReadCancelled)
    assert not readers()


def test_a_hung_check_at_the_end_is_left_behind(mount: Mount, source: OpenCheckpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    hung = Mount()
    hung.answers.clear()
    monkeypatch.setattr(weight_stream, "check_unchanged", lambda *_: hung.wait())
    load = Streaming(source)
    hung.until_waiting(1)
    load.cancelled.set()
    assert load.has_ended()
    assert isinstance(load.error, ReadCancelled)
    hung.answers.set()


def test_calls_return_and_raise_what_the_work_does() -> None:
    with FileCalls("m", lambda: True) as calls:
        assert calls.run(lambda: 7) == 7
        with pytest.raises(TimeoutError, match="from within"):
            calls.run(lambda: raise_(TimeoutError("from within")))
        assert calls.run(threading.current_thread) is not threading.current_thread()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_has_no_memory_left_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(*_: object) -> None:
        raise MemoryError

    with FileCalls("m", lambda: False) as calls:
        for name in ("set_result", "set_exception"):
            monkeypatch.setattr(file_calls.Future, name, none_left)
        with pytest.raises(MemoryError, match="m: the thread that calls the file system has ended"):
            calls.run(lambda: 7)
        monkeypatch.undo()


def test_readers_that_cannot_be_started_end_the_load(source: OpenCheckpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    start, numbers = threading.Thread.start, iter(range(1000))

    def started(thread: threading.Thread) -> None:
        if thread.name.startswith("reader") and next(numbers) == 2:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", started)
    load = Streaming(source)
    assert load.has_ended()
    assert isinstance(load.error, MemoryError)
    assert not readers()
    assert load.ring._free.qsize() == NUM_SLOTS


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_readers_that_have_no_memory_left_are_not_waited_for(source: OpenCheckpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_stream, "LOOK_EVERY_S", 0.01)
    monkeypatch.setattr(weight_stream, "LEAVE_AFTER_S", 0.05)
    monkeypatch.setattr(weight_stream, "SimpleQueue", Full)
    load = Streaming(source)
    assert load.has_ended()
    assert isinstance(load.error, MemoryError)
    assert not readers()
    assert load.ring._free.qsize() >= NUM_SLOTS


class Full(SimpleQueue):  # type: ignore[type-arg]
    """A queue into which the reader threads cannot put anything."""

    def put(self, item: object, block: bool = True, timeout: float | None = None) -> None:
        if threading.current_thread().name.startswith("reader"):
            raise MemoryError
        super().put(item, block, timeout)


def raise_(error: Exception) -> None:
    raise error


def test_what_is_open_is_closed_by_the_thread_once_it_can(mount: Mount) -> None:
    closed = threading.Event()
    mount.answers.clear()
    begun = time.monotonic()
    with FileCalls("m", lambda: True) as calls:
        calls.opened.callback(closed.set)
        with pytest.raises(ReadCancelled, match="m: cancelled while the file system did not answer"):
            calls.run(mount.wait)
    assert time.monotonic() - begun < LIMIT_S / 2
    assert not closed.is_set()
    mount.answers.set()
    assert closed.wait(LIMIT_S)


def test_only_a_call_under_way_can_be_left_behind() -> None:
    call = CallUnderWay()
    assert not call.leave()
    with call:
        pass
    assert not call.leave()
    with pytest.raises(LeftBehind), call:
        assert call.leave()
    with pytest.raises(LeftBehind), call:
        raise_(OSError("the file system has ended the call") if call.leave() else AssertionError("it is under way"))


def test_what_is_local(tmp_path: Path) -> None:
    for path, expected in ((tmp_path, True), (Path("/proc/self"), False)):
        fd = os.open(path, os.O_RDONLY)
        try:
            assert is_local(fd) is expected, path
        finally:
            os.close(fd)
    assert is_local(-1) is False
