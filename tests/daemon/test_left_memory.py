"""The daemon's side of memory that outlives engines: who is given it, what is offered with it, and when it is let go."""

from __future__ import annotations

import fcntl
import os
import resource
import select
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from daemon.engines.left_memory import EARLY_S, LeftMemory
from daemon.engines.workers import FAULTY_MEMORY
from engine import protocol
from engine.memory import handles
from engine.serve.channel import wait_until
from tests.engine.engine_process import load_message

CHUNKS, CHUNK_BYTES = 8, 1 << 16


@contextmanager
def engine(left: LeftMemory, lowest_fd: int = 0) -> Iterator[socket.socket]:
    """Yields the engine's end of the socket, until its death. lowest_fd: its descriptor is at least this."""
    ours, first = socket.socketpair()
    theirs = socket.socket(fileno=fcntl.fcntl(first, fcntl.F_DUPFD_CLOEXEC, lowest_fd))
    first.close()
    thread = threading.Thread(target=left.exchange, args=(ours,))
    thread.start()
    with theirs:
        yield theirs
    thread.join(10)
    assert not thread.is_alive()


def ask(sock: socket.socket, num_chunks: int = CHUNKS) -> handles.Received:
    handles.send(sock, [], num_chunks, CHUNK_BYTES)
    return handles.receive(sock)


def memory(text: bytes) -> int:
    fd = os.memfd_create("chunks")
    os.write(fd, text)
    return fd


def held(model: str, placement_id: int, *chunks: int) -> protocol.WeightsHeld:
    return protocol.WeightsHeld(placement_id, model, "print", "float32", "", len(chunks) * CHUNK_BYTES, list(chunks), 77)


def first_life(left: LeftMemory, *weights: protocol.WeightsHeld, text: bytes = b"weights") -> None:
    """An engine that makes memory, and loads these."""
    with engine(left) as sock:
        assert ask(sock).handles == []
        fd = memory(text)
        handles.send(sock, [fd], CHUNKS, CHUNK_BYTES)
        os.close(fd)
        for one in weights:
            left.sent(load_message("path", one.model, one.placement_id))
            left.told(one)


def end(left: LeftMemory, **changes: Any) -> None:
    left.ended(**({"came_up": True, "lasted_s": 2 * EARLY_S, "distrusted": False, "kernel_killed": False} | changes))


def test_the_next_engine_is_given_what_the_first_has_made() -> None:
    left = LeftMemory("cpu:0", is_host=True)
    first_life(left, held("a", 1, 3, 4), held("b", 2, 5))
    for _ in range(2):
        end(left)
        with engine(left) as sock:
            given = ask(sock)
            assert [os.pread(fd, 99, 0) for fd in given.handles] == [b"weights"]
            assert [weights.model for weights in protocol.decode_held(given.note)] == ["a", "b"]
            handles.close(given.handles)


def test_what_is_told_to_come_or_to_leave_is_not_offered() -> None:
    left = LeftMemory("cpu:0", is_host=True)
    first_life(left, held("a", 1, 3, 4), held("b", 2, 5), held("c", 3, 6))
    left.sent(protocol.EvictModel(1, "a", 0))
    left.told(held("a", 1, 3, 4))  # said before it heard of that
    left.sent(load_message("path", "b", 4))
    left.told(held("b", 2, 5))  # of the load before
    assert left.models == ["c"]
    left.told(held("b", 4, 2, 6))  # in a chunk where "c" was: that was left by an engine before
    assert left.models == ["b"]


def test_memory_of_another_shape_is_let_go_before_the_new_one_is_made(caplog: pytest.LogCaptureFixture) -> None:
    left = LeftMemory("cuda:0", is_host=False)
    first_life(left, held("a", 1, 3))
    end(left)
    with engine(left) as sock:
        assert ask(sock, CHUNKS - 1).handles == []
        assert left.models == []
    assert "given up: the next engine wants 7 chunks of 65536 bytes" in caplog.text


@pytest.mark.parametrize(
    ("is_host", "how", "stays"),
    [
        (True, {}, True),
        (True, {"lasted_s": 1.0}, True),
        (True, {"came_up": False}, False),
        (True, {"distrusted": True}, False),
        (True, {"kernel_killed": True}, False),
        (False, {"kernel_killed": True}, True),
    ],
)
def test_when_it_is_let_go(is_host: bool, how: dict[str, Any], stays: bool) -> None:
    left = LeftMemory("d", is_host)
    before = len(os.listdir("/proc/self/fd"))
    first_life(left, held("a", 1, 3))
    end(left, **how)
    assert left.models == (["a"] if stays else [])
    assert (len(os.listdir("/proc/self/fd")) > before) == stays


def test_engines_that_took_it_over_and_died_early_twice_in_a_row() -> None:
    left = LeftMemory("d", is_host=False)
    first_life(left, held("a", 1, 3))
    end(left, lasted_s=1.0)
    for lasted_s, stays in ((1.0, True), (2 * EARLY_S, True), (1.0, True), (1.0, False)):
        with engine(left) as sock:
            handles.close(ask(sock).handles)
        end(left, lasted_s=lasted_s)
        assert bool(left.models) == stays


def test_an_engine_that_says_nothing_or_half_of_it_leaves_nothing() -> None:
    left = LeftMemory("d", is_host=True)
    with engine(left):
        pass
    with engine(left) as sock:
        ask(sock)
        sock.sendall(handles._header.pack(1, CHUNKS, CHUNK_BYTES, 0))
    end(left)
    assert left.models == []


def test_memory_without_weights_is_not_kept() -> None:
    left = LeftMemory("d", is_host=True)
    before = len(os.listdir("/proc/self/fd"))
    first_life(left)
    end(left)
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(
    ("reason", "faulty"),
    [
        ("ended with exit code 70: AcceleratorError: CUDA error: uncorrectable ECC error encountered", True),
        ("ended with exit code 70: AcceleratorError: CUDA error: an illegal memory access was encountered", False),
        ("was ended by SIGKILL", False),
    ],
)
def test_what_the_driver_calls_its_memorys_fault(reason: str, faulty: bool) -> None:
    assert bool(FAULTY_MEMORY.search(reason)) == faulty


@pytest.fixture
def few_files() -> Iterator[int]:
    """Lowers the limit of open files to a hundred more than tests before this one have left open here, and yields it."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = max(400, len(os.listdir("/proc/self/fd")) + 100)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, before[1]))
    yield limit
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_device_may_have_more_chunks_than_a_shell_allows_files(few_files: int) -> None:
    left, num_chunks = LeftMemory("cuda:0", is_host=False), max(1100, few_files + 100)
    with engine(left) as sock:
        assert ask(sock, num_chunks).handles == []
        fd = memory(b"weights")
        handles.send(sock, [fd] * num_chunks, num_chunks, CHUNK_BYTES)
        os.close(fd)
        left.sent(load_message("path", "ash", 1))
        left.told(held("ash", 1, 0, 1))
    left.ended(came_up=True, lasted_s=9.0, distrusted=False, kernel_killed=False)
    try:
        assert left.models == ["ash"]
        with engine(left, lowest_fd=1024) as sock:  # a number as engines' sockets may have now, beyond what select(2) takes
            given = ask(sock, num_chunks)
            handles.close(given.handles)
            assert wait_until(sock, select.POLLIN, 10.0), "its other end closes"
        assert len(given.handles) == num_chunks
    finally:
        left.let_go("")
