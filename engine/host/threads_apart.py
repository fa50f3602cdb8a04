"""Binds each compute thread of an engine to a core of its own during steps that follow a time without steps.

A parallel matrix multiplication wakes the threads that share it. Linux often wakes a thread that has slept for some time on the
core of the thread that wakes it, even if another core is idle, because how far it searches for an idle core depends on the load
that it saw last. Two threads then have half a core each until the load balancer separates them.

Measured with 2 threads on 2 cores (Linux 6.18, a virtual machine), after 0.1 s or more without a step: a prompt of 48 tokens took
38 ms, of which it waited 18 ms for a core, and the step after it took 16.7 ms. With each thread bound to a core of its own, they
took 20.5 and 9.0 ms, the same as in steps that follow each other at once. So threads are bound during the first steps after a time
without any. Between these steps, and afterwards, they may run on any core.

If there are as many compute threads as cores, they are bound during every step. Otherwise other threads that run between two steps
(the daemon, with the tokens of the last one) move one compute thread to the core of another, and both may stay there: of 2,700
steps of 8.6 ms, one in a hundred took 18 ms, with all its computing on one core. In this case the calling thread, and threads that
it has started, are free between steps; the other compute threads stay bound until the next time without steps."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

log = logging.getLogger("engine")
Result = TypeVar("Result")

AFTER_PAUSE_S = 0.03
FOR_S = 0.1  # how long threads are bound after a pause; by then Linux has seen that there is load for all cores
LEARN_EVERY_STEPS = 256
_TASKS = "/proc/self/task"
_PROCESSOR = 36  # field number in a task's stat, counted after the task's name


class ThreadsApart:
    """Keeps an engine's num_threads compute threads on different cores while steps run. The compute threads are the thread that
    calls `run`, which must always be the same, and those that compute with it. With one thread, nothing is bound."""

    def __init__(self, num_threads: int) -> None:
        self._num_others = num_threads - 1
        self._others: list[int] = []  # native ids of the compute threads, without the calling one
        self._ran_ns: dict[int, int] = {}
        self._cores: dict[int, int] = {}  # thread -> its core, once chosen; the calling thread comes first
        self._free_to: dict[int, set[int]] = {}  # thread -> cores it may run on when it is not bound
        self._seen: set[int] = set()  # all threads of the process when it last looked
        self._ended_s = self._until_s = 0.0
        self._num_steps = 0

    def run(self, step: Callable[[], Result]) -> Result:
        if self._num_others <= 0:
            return step()
        now = time.monotonic()
        if now - self._ended_s > AFTER_PAUSE_S:
            self._until_s = now + FOR_S
            self._let_go()  # where the threads ran before the pause says nothing now
        if self._others:
            if self._cores:
                self._bind([threading.get_native_id()])
            elif now < self._until_s or self._take_all_cores():
                self._choose()
        try:
            return step()
        finally:
            self._end()

    def _end(self) -> None:
        if self._cores:
            if self._take_all_cores():
                self._free_caller()
            else:
                self._let_go()
        if self._num_others <= 0:
            return
        number = self._num_steps = self._num_steps + 1
        if number % LEARN_EVERY_STEPS == 0 or (number & (number - 1) == 0):  # soon after the first step, too
            self._learn()
        self._ended_s = time.monotonic()

    def _take_all_cores(self) -> bool:
        return self._num_others + 1 == len(self._free_to.get(threading.get_native_id()) or os.sched_getaffinity(0))

    def _choose(self) -> None:
        """Chooses a core for each compute thread and binds the threads to their cores. If one of the threads has ended, binds none
        and forgets them all; `_learn` finds the compute threads again later."""
        me = threading.get_native_id()
        try:
            self._seen = _threads()
            self._free_to = {thread: os.sched_getaffinity(thread) for thread in (me, *self._others)}
            self._cores = own_cores({thread: _core_of(thread) for thread in self._free_to}, self._free_to[me])
        except (ProcessLookupError, FileNotFoundError):  # a thread has ended: the compute threads are learned again
            self._others = []
            return
        self._bind(list(self._cores))

    def _bind(self, threads: Sequence[int]) -> None:
        try:
            for thread in threads:
                os.sched_setaffinity(thread, {self._cores[thread]})
        except ProcessLookupError:
            self._let_go()
            self._others = []
        except OSError as error:
            self._let_go()
            log.warning("compute threads stay on the cores where they wake: %s", error)
            self._num_others = 0

    def _free_caller(self) -> None:
        """Lets the calling thread run again on all cores on which it could run before it was bound. Does the same for threads that
        it started during the step, because they were bound to the same core."""
        me = threading.get_native_id()
        its_core, free_to = {self._cores[me]}, self._free_to[me]
        before, self._seen = self._seen, _threads()
        for thread in (me, *(self._seen - before)):
            with contextlib.suppress(OSError):  # it has ended
                if os.sched_getaffinity(thread) == its_core:
                    os.sched_setaffinity(thread, free_to)

    def _let_go(self) -> None:
        if self._cores:
            self._free_caller()
        for thread in self._cores:
            with contextlib.suppress(OSError):  # it has ended, or may not run there any more
                os.sched_setaffinity(thread, self._free_to[thread])
        self._cores, self._free_to = {}, {}

    def _learn(self) -> None:
        """Finds the compute threads and keeps their ids: of the threads that Python did not start, those that have run longest
        since the last call. If none of them has run since then, the ids stay as they are."""
        known = {thread.native_id or 0 for thread in threading.enumerate()}
        ran_ns = {thread: _ran_ns(thread) for thread in _threads() - known}
        lately = {thread: ns - self._ran_ns.get(thread, 0) for thread, ns in ran_ns.items()}
        most = [thread for thread in sorted(lately, key=lately.__getitem__)[-self._num_others :] if lately[thread] > 0]
        if most and set(most) != set(self._others):
            self._let_go()
            self._others = most
        self._ran_ns = ran_ns


def own_cores(ran_on: Mapping[int, int], allowed: set[int]) -> dict[int, int]:
    """Returns thread -> core, with a different core for each thread: the core on which the thread ran last if it is allowed and no
    earlier thread ran there, else an unused core. ran_on: thread -> core on which it ran last, in the order of the threads. Returns
    {} if there are fewer allowed cores than threads."""
    if len(allowed) < len(ran_on):
        return {}
    found: dict[int, int] = {}
    for thread, core in ran_on.items():
        if core in allowed and core not in found.values():
            found[thread] = core
    free = sorted(allowed - set(found.values()))
    return found | dict(zip([thread for thread in ran_on if thread not in found], free, strict=False))


def _threads() -> set[int]:
    """Returns the native ids of this process's threads; empty if /proc cannot be read."""
    try:
        return set(map(int, os.listdir(_TASKS)))
    except OSError:
        return set()


def _core_of(thread: int) -> int:
    with open(f"{_TASKS}/{thread}/stat", "rb") as file:
        return int(file.read().rpartition(b")")[2].split()[_PROCESSOR])


def _ran_ns(thread: int) -> int:
    """Returns the processor time of a thread in nanoseconds; 0 if the system's kernel does not count it, or if the thread has
    ended."""
    try:
        with open(f"{_TASKS}/{thread}/schedstat", "rb") as file:
            return int(file.read().split()[0])
    except OSError:
        return 0
