"""The content of a device's chunks outlives the process that wrote it, as long as another process holds the chunks' descriptors."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from engine.cpu.memory import CpuMemory
from engine.memory import handles
from engine.memory.handover import Handover
from engine.memory.weight_range import WeightRange

ROOT = Path(__file__).parents[2]
CHUNK = 2 << 20
NUM_CHUNKS, WEIGHTS_BYTES, PLACES = 6, 2 * CHUNK + 1234, [4, 1, 2]

# What an engine does with its memory: "make" writes weights and waits to be killed, "have" prints the checksum of what it found.
LIFE = """
import socket, sys
import torch
from engine.memory import handles
from engine.{module} import {kind}
from engine.memory.weight_range import WeightRange
sock = socket.socket(fileno=int(sys.argv[2]))
given, num_chunks, chunk_bytes, note = handles.receive(sock)
memory = {kind}(num_chunks, chunk_bytes, {options}handles=given)
weights = WeightRange(memory, {num_bytes})
weights.map({places})
if sys.argv[1] == "make":
    weights.tensor(0, ({num_bytes},), torch.uint8)[:] = torch.arange({num_bytes}, device=memory.arena.device).remainder(251).byte()
    handles.send(sock, memory.export(), num_chunks, chunk_bytes)
print(memory.checksum(weights.address, {num_bytes}), flush=True)
sys.stdin.read()
"""


def lives(what: str, kind: tuple[str, str, str], given: Sequence[int]) -> tuple[str, list[int]]:
    """Runs a process until it is killed with SIGKILL, and returns what it printed and the handles it sent. what: "make" writes
    weights to the memory, "have" prints the checksum of what it finds. given: handles of the memory that it starts with."""
    module, name, options = kind
    program = LIFE.format(module=module, kind=name, options=options, num_bytes=WEIGHTS_BYTES, places=PLACES)
    ours, theirs = socket.socketpair()
    process = subprocess.Popen(
        [sys.executable, "-c", program, what, str(theirs.fileno())],
        cwd=ROOT,
        pass_fds=[theirs.fileno()],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    theirs.close()
    handles.send(ours, given, NUM_CHUNKS, CHUNK)
    assert process.stdout is not None
    told = process.stdout.readline()
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=30)
    assert process.returncode == -signal.SIGKILL
    with ours:
        return told, handles.receive(ours).handles if what == "make" else []


def outlive(kind: tuple[str, str, str]) -> None:
    """Weights written by one process are found by two later ones, which get its handles after its death. Without handles they are
    not found."""
    told, kept = lives("make", kind, [])
    assert int(told)
    assert lives("have", kind, kept)[0] == told
    assert lives("have", kind, kept)[0] == told
    for fd in kept:
        os.close(fd)
    assert lives("have", kind, [])[0] != told


def test_weights_outlive_their_process() -> None:
    outlive(("cpu.memory", "CpuMemory", ""))


def test_a_second_memory_of_the_same_chunks() -> None:
    first = CpuMemory(NUM_CHUNKS, CHUNK)
    weights = WeightRange(first, WEIGHTS_BYTES)
    weights.map(PLACES)
    np.frombuffer(weights.buffer, np.uint8)[:] = np.random.default_rng(3).integers(0, 256, WEIGHTS_BYTES, np.uint8)
    kept, told = first.export(), first.checksum(weights.address, WEIGHTS_BYTES)
    weights.close()
    first.close()
    with pytest.raises(ValueError, match="1 handles that are not those of 7 chunks"):
        CpuMemory(NUM_CHUNKS + 1, CHUNK, handles=kept)
    second = CpuMemory(NUM_CHUNKS, CHUNK, handles=kept)
    for fd in kept:
        os.close(fd)
    again = WeightRange(second, WEIGHTS_BYTES)
    again.map(PLACES)
    assert second.checksum(again.address, WEIGHTS_BYTES) == told
    again.unmap()
    again.map(PLACES[::-1])
    assert second.checksum(again.address, WEIGHTS_BYTES) != told
    again.close()
    second.close()


def test_more_handles_than_a_message_takes() -> None:
    ours, theirs = socket.socketpair()
    num_handles = 2 * handles.MAX_FDS + 7
    handles.allow_many_files(2 * num_handles)  # this process holds both ends; shells allow 1,024
    made = [os.memfd_create(f"chunk {number}") for number in range(num_handles)]
    for number, fd in enumerate(made):
        os.write(fd, str(number).encode())
    sender = threading.Thread(target=handles.send, args=(theirs, made, len(made), CHUNK, b"of whom" * 9999))
    sender.start()
    came, num_chunks, chunk_bytes, note = handles.receive(ours)
    sender.join()
    assert (num_chunks, chunk_bytes, note) == (len(made), CHUNK, b"of whom" * 9999)
    assert [int(os.pread(fd, 9, 0)) for fd in came] == list(range(len(made)))
    for fd in made + came:
        os.close(fd)
    ours.close()
    theirs.close()


def test_a_sender_that_ends_too_early_leaves_nothing_open() -> None:
    ours, theirs = socket.socketpair()
    fd = os.memfd_create("chunk")
    theirs.sendall(handles._header.pack(2, 2, CHUNK, 0))
    socket.send_fds(theirs, [b"h"], [fd])
    theirs.close()
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(ConnectionResetError, match="1 of 2 handles came: the sender is gone"):
        handles.receive(ours)
    assert set(os.listdir("/proc/self/fd")) <= before
    with pytest.raises(ConnectionResetError, match="the sender is gone"):
        handles.receive(ours)
    ours.close()
    os.close(fd)


def test_without_memory_for_a_thread_the_memory_ends_with_its_engine(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    ours, others = socket.socketpair()
    memory = CpuMemory(1, CHUNK)
    with ours, others:
        monkeypatch.setattr(threading.Thread, "start", refused)
        Handover(ours).give(memory)
    assert "this engine's memory does not outlive it: thread handover: can't start new thread" in caplog.text
    memory.close()
