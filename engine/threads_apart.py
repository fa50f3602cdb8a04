"""A core for each compute thread when a step comes after a pause.

A parallel product wakes the threads that share it. Those that have slept for some time Linux often wakes on the core of the one
that wakes them, though another is idle: it looks for one no further than the load it saw last allows. Two threads then have half a
core each until the balancer parts them. Measured with 2 threads on 2 cores (Linux 6.18, a virtual machine): after a pause of 0.1 s
and more a prompt of 48 tokens took 38 ms, 18 of them in wait for a core, and the step behind it 16.7 ms; bound to a core each 20.5
and 9.0 ms, as without a pause. So it is done for the first steps after one; between them, and afterwards, all may run anywhere.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import TypeVar

log = logging.getLogger("engine")
Result = TypeVar("Result")

AFTER_PAUSE_S = 0.03
FOR_S = 0.1  # from the end of a pause: until then Linux has seen that there is load for all cores
LEARN_EVERY_STEPS = 256
_TASKS = "/proc/self/task"
_PROCESSOR = 36  # of a task's stat, counted from behind its name


class ThreadsApart:
    """The calling thread and those that compute with it, num_threads in all; with one there is nothing to do."""

    def __init__(self, num_threads: int) -> None:
        self._num_others = num_threads - 1
        self._others: list[int] = []  # native ids of the threads that compute, but for the calling one
        self._ran_ns: dict[int, int] = {}
        self._bound: dict[int, set[int]] = {}  # thread -> where it may run otherwise
        self._were_there: set[int] = set()  # all threads, when they were bound
        self._ended_s = self._until_s = 0.0
        self._num_steps = 0

    def run(self, step: Callable[[], Result]) -> Result:
        if self._num_others <= 0:
            return step()
        now = time.monotonic()
        if now - self._ended_s > AFTER_PAUSE_S:
            self._until_s = now + FOR_S
        if self._others and now < self._until_s:
            self._bind()
        try:
            return step()
        finally:
            self._end()

    def _end(self) -> None:
        if self._bound:
            self._let_go()
        if self._num_others <= 0:
            return
        number = self._num_steps = self._num_steps + 1
        if number % LEARN_EVERY_STEPS == 0 or (number & (number - 1) == 0):  # soon after the first step, too
            self._learn()
        self._ended_s = time.monotonic()

    def _bind(self) -> None:
        me = threading.get_native_id()
        try:
            self._were_there = _threads()
            free_to = {thread: os.sched_getaffinity(thread) for thread in (me, *self._others)}
            ran_on = {thread: _core_of(thread) for thread in free_to}
            for thread, core in own_cores(ran_on, free_to[me]).items():
                os.sched_setaffinity(thread, {core})
                self._bound[thread] = free_to[thread]
        except (ProcessLookupError, FileNotFoundError):  # one has ended; who computes now is learned again
            self._let_go()
            self._others = []
        except OSError as error:
            self._let_go()
            log.warning("compute threads stay on the cores where they wake: %s", error)
            self._num_others = 0

    def _let_go(self) -> None:
        inherited = self._bound.get(threading.get_native_id(), set())
        made = dict.fromkeys(_threads() - self._were_there, inherited) if inherited else {}
        for thread, cores in (self._bound | made).items():
            with contextlib.suppress(OSError):  # it has ended, or may not run there any more
                os.sched_setaffinity(thread, cores)
        self._bound.clear()

    def _learn(self) -> None:
        """The threads that ran most since it was last asked, of those that Python knows nothing of; as before where none ran."""
        known = {thread.native_id or 0 for thread in threading.enumerate()}
        ran_ns = {thread: _ran_ns(thread) for thread in _threads() - known}
        lately = {thread: ns - self._ran_ns.get(thread, 0) for thread, ns in ran_ns.items()}
        most = [thread for thread in sorted(lately, key=lately.__getitem__)[-self._num_others :] if lately[thread] > 0]
        self._others = most or self._others
        self._ran_ns = ran_ns


def own_cores(ran_on: Mapping[int, int], allowed: set[int]) -> dict[int, int]:
    """A core for each thread: where it ran last, unless one before it has that; then one where none of them ran. ran_on: thread ->
    core, in order. Without enough allowed cores: nothing."""
    if len(allowed) < len(ran_on):
        return {}
    found: dict[int, int] = {}
    for thread, core in ran_on.items():
        if core in allowed and core not in found.values():
            found[thread] = core
    free = sorted(allowed - set(found.values()))
    return found | dict(zip([thread for thread in ran_on if thread not in found], free, strict=False))


def _threads() -> set[int]:
    """Of this process; none where /proc does not tell."""
    try:
        return set(map(int, os.listdir(_TASKS)))
    except OSError:
        return set()


def _core_of(thread: int) -> int:
    with open(f"{_TASKS}/{thread}/stat", "rb") as file:
        return int(file.read().rpartition(b")")[2].split()[_PROCESSOR])


def _ran_ns(thread: int) -> int:
    """0 where the kernel does not count, or the thread has ended."""
    try:
        with open(f"{_TASKS}/{thread}/schedstat", "rb") as file:
            return int(file.read().split()[0])
    except OSError:
        return 0
