"""Processes that are the ranks of a group, for tests: they share memory, and each runs the functions that it is told.

They are forked from one process that has imported everything and loaded the compiled kernels, so a rank costs little.
"""

from __future__ import annotations

import mmap
import multiprocessing
import os
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from engine.host.rank_memory import rank_memory_bytes
from tests import interpreter

BUFFER_BYTES = 1024  # so small that tensors go in several pieces
STAGE_BYTES = 4 << 20  # for the states that stages pass on
_HEAD_BYTES = 64  # the flag that the group is broken, and how many steps rank 0 has ended
_WAIT_S = 100.0


class Rank:
    """What a function in a rank's process is given. memory: for SharedRanks. stages: for StageLinks. ended [1]: how many steps rank
    0 has ended. kept: what earlier functions have left."""

    def __init__(self, rank: int, size: int, fd: int) -> None:
        self.rank, self.size = rank, size
        every = np.frombuffer(mmap.mmap(fd, 0), np.uint8)
        self.broken, self.ended = every[:8].view(np.int64), every[8:16].view(np.int64)
        self.memory, self.stages = every[_HEAD_BYTES:-STAGE_BYTES], every[-STAGE_BYTES:]
        self.kept: dict[str, Any] = {}


class RankGroup:
    """The ranks of a group. broken [1]: the flag, as the daemon would set it."""

    def __init__(self, size: int) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.engine.rank_kernels"])
        self.size, self._fd = size, _memory_of(size)
        self._every = np.frombuffer(mmap.mmap(self._fd, 0), np.uint8)
        self.broken = self._every[:8].view(np.int64)
        path = f"/proc/{os.getpid()}/fd/{self._fd}"
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(size):
            own, other = context.Pipe()
            self._processes.append(context.Process(target=_serve, args=(other, rank, size, path), daemon=True))
            self._processes[-1].start()
            other.close()
            self._pipes.append(own)

    def renew(self) -> None:
        """Makes the memory that of a new group. The ranks must make their views of it anew."""
        self._every[:] = 0

    def start(self, function: Callable[..., Any], *args: Any, ranks: Sequence[int] | None = None) -> None:
        """Has ranks call function(Rank, *args). args that are lists hold one value a rank."""
        for rank in range(self.size) if ranks is None else ranks:
            own = [arg[rank] if isinstance(arg, list) else arg for arg in args]
            self._pipes[rank].send((function, own))

    def results(self, ranks: Sequence[int] | None = None) -> list[Any]:
        """Returns what the ranks' functions return. Raises AssertionError with the traceback of one that raises."""
        told = []
        for rank in range(self.size) if ranks is None else ranks:
            assert self._pipes[rank].poll(_WAIT_S), f"rank {rank} does not answer"
            result, problem = self._pipes[rank].recv()
            assert not problem, f"rank {rank}: {problem}"
            told.append(result)
        return told

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        self.start(function, *args)
        return self.results()

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(5.0)
            process.kill()
        os.close(self._fd)


def ranks_here(size: int) -> list[Rank]:
    """Returns the ranks of a group whose functions one thread of this process calls, one after the other."""
    fd = _memory_of(size)
    try:
        return [Rank(rank, size, fd) for rank in range(size)]
    finally:
        os.close(fd)


def _memory_of(size: int) -> int:
    """Returns a descriptor of the memory that the ranks of a new group share."""
    fd = os.memfd_create("ranks")
    os.ftruncate(fd, _HEAD_BYTES + rank_memory_bytes(size, BUFFER_BYTES) + STAGE_BYTES)
    return fd


def _serve(pipe: Connection, rank: int, size: int, path: str) -> None:
    fd = os.open(path, os.O_RDWR)
    own = Rank(rank, size, fd)
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        interpreter.quicken()  # where the function's module imported one
        try:
            pipe.send((function(own, *args), ""))
        except Exception:
            pipe.send((None, traceback.format_exc()))
