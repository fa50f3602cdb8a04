"""Threads that run one at a time, in an order drawn from a seed. They change over only at points: the calls to the device."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from tests.engine.races.clocks import Clock

SWITCH = 0.3  # the probability that another thread goes on at a point


class Host:
    """What belongs to one thread of the host. streams: the current one is the last; none: the default stream."""

    def __init__(self, name: str, clock: Clock) -> None:
        self.name, self.clock = name, clock
        self.streams: list[Any] = []
        self.handle: int | None = None  # cuBLAS's
        self.kv: list[Any] = []  # what the steps that it launches access
        self.adapters: list[Any] = []  # where the LoRA adapters of these steps lie
        self.go = threading.Semaphore(0)
        self.waits_for: Host | None = None
        self.ended = False
        self.tick()

    def tick(self) -> None:
        self.clock[self.name] = self.clock.get(self.name, 0) + 1


class Schedule:
    """Runs the threads of one run. The calling thread is the first. on_end: called in each other one when it ends."""

    def __init__(self, seed: int, on_end: Callable[[Host], None] = lambda host: None) -> None:
        self.random, self._on_end = random.Random(seed), on_end
        self._here = threading.local()
        self.first = self._here.host = Host("loop", Clock())
        self._hosts = [self.first]
        self.errors: list[BaseException] = []
        self._num_started = 0

    @property
    def host(self) -> Host:
        """The thread that runs."""
        return self._here.host

    @property
    def num_running(self) -> int:
        return len(self._hosts) - 1

    def point(self) -> None:
        """Lets another thread go on, or none."""
        if len(self._hosts) > 1 and self.random.random() < SWITCH:
            self._go_on()

    def thread(self, target: Callable[..., None], args: tuple[Any, ...] = (), name: str = "") -> Thread:
        """Stands in for loader.threads.Thread."""
        self._num_started += 1
        return Thread(self, target, args, f"{name} {self._num_started}")

    @property
    def threading(self) -> SimpleNamespace:
        """Stands in for the module threading."""
        return SimpleNamespace(Lock=lambda: Lock(self), Event=lambda: Event(self))

    def start(self, host: Host, run: Callable[[], None]) -> None:
        def begin() -> None:
            host.go.acquire()
            self._here.host = host
            try:
                run()
            except BaseException as error:
                self.errors.append(error)
            self._on_end(host)
            host.ended = True
            host.tick()
            self._hosts.remove(host)
            self._next().go.release()

        host.clock.join(self.host.clock)
        self.host.tick()
        self._hosts.append(host)
        threading.Thread(target=begin, daemon=True).start()
        self.point()

    def join(self, host: Host) -> None:
        me = self.host
        while not host.ended:
            me.waits_for = host
            self._go_on()
        me.waits_for = None
        me.clock.join(host.clock)

    def _next(self) -> Host:
        return self.random.choice([host for host in self._hosts if host.waits_for is None or host.waits_for.ended])

    def _go_on(self) -> None:
        me, other = self.host, self._next()
        if other is not me:
            other.go.release()
            me.go.acquire()


class Lock:
    """A lock that lets the other threads of a schedule go on. What it is released with is handed over."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule, self._holder, self._clock = schedule, None, Clock()

    def __enter__(self) -> None:
        while self._holder is not None:
            self._schedule.point()
        self._holder = self._schedule.host
        self._holder.clock.join(self._clock)

    def __exit__(self, *error: object) -> None:
        self._clock.join(self._schedule.host.clock)
        self._schedule.host.tick()
        self._holder = None


class Event:
    """Stands in for a threading.Event that is waited for with a timeout: others go on, or none, and it orders nothing."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule

    def set(self) -> None:
        self._schedule.point()

    def clear(self) -> None:
        self._schedule.point()

    def wait(self, timeout: float) -> None:
        self._schedule.point()


class Thread:
    """Stands in for a thread of a Schedule."""

    def __init__(self, schedule: Schedule, target: Callable[..., None], args: tuple[Any, ...], name: str) -> None:
        self._schedule, self._target, self._args = schedule, target, args
        self.host = Host(name, Clock())

    def start(self) -> None:
        self._schedule.start(self.host, lambda: self._target(*self._args))

    def join(self) -> None:
        self._schedule.join(self.host)
