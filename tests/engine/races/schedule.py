"""Threads that run one at a time, in an order drawn from a seed. They change over only at points: the calls to the device."""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from tests.engine.races.clocks import Clock

SWITCH = 0.3  # the probability that another thread goes on at a point
LATE = 0.002  # the probability that a wait with a limit ends at its limit, each time that another thread is to go on
LATER_TURNS = 500  # turns of a thread that waits for what others do, after each of which LATE is added to that probability

MOST_LATE = 200  # waits in a row that end at their limits while no other thread can go on
MOST_TURNS = 20_000  # of a thread that waits for what others do


class Stuck(Exception):
    """Raised in all threads that wait once each of them waits for another one."""


class Host:
    """What belongs to one thread of the host. streams: the current one is the last; none: the default stream. device: the device
    of the engine whose thread it is. awaits: says whether a wait of this thread is over; None: it does not wait. awaited: what it
    waits for, in words. is_limited: whether the wait may also end because it takes too long."""

    def __init__(self, name: str, clock: Clock) -> None:
        self.name, self.clock = name, clock
        self.streams: list[Any] = []
        self.handle: int | None = None  # cuBLAS's
        self.kv: list[Any] = []  # what the steps that it launches access
        self.adapters: list[Any] = []  # where the LoRA adapters of these steps lie
        self.masks: list[Any] = []  # the page-locked masks that these steps point at
        self.group = 0  # the group of the share whose step it launches
        self.go = threading.Semaphore(0)
        self.device: Any = None
        self.awaits: Callable[[], bool] | None = None
        self.awaited, self.is_limited = "", False
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
        self.stuck = ""  # what each thread waits for, once none can go on
        self._num_started = self._num_late = 0
        self._late = LATE

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
        return Thread(self, target, args, f"{self.host.device.prefix}{name} {self._num_started}")

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
        self.wait(lambda: host.ended, f"the end of {host.name}")
        self.host.clock.join(host.clock)

    def wait(self, is_over: Callable[[], bool], what: str, is_limited: bool = False) -> bool:
        """Lets other threads go on until is_over(). is_limited: the wait may end before that, and then this returns False. Raises
        Stuck if no thread can go on."""
        me = self.host
        if not is_over():
            me.awaits, me.awaited, me.is_limited = is_over, what, is_limited
            self._go_on()
            me.awaits = None
            if self.stuck:
                raise Stuck(self.stuck)
        return is_over()

    def _next(self) -> Host:
        if self.stuck:
            return self.random.choice(self._hosts)
        can_go_on = [host for host in self._hosts if host.awaits is None or host.awaits()]
        limited = [host for host in self._hosts if host.awaits is not None and host.is_limited]
        self._num_late = 0 if can_go_on else self._num_late + 1
        if limited and (self._num_late in range(1, MOST_LATE) or self.random.random() < self._late):
            return self.random.choice(limited)
        if can_go_on:
            return self.random.choice(can_go_on)
        self._give_up()
        return self.random.choice(self._hosts)

    def go_on_until(self, is_over: Callable[[], bool], turn: Callable[[], None]) -> None:
        """Takes turns beside the other threads until is_over(). The longer it takes, the more often waits with a limit end. Raises
        Stuck if it takes so long that the others wait for each other."""
        for num_turns in range(MOST_TURNS):
            if is_over():
                self._late = LATE
                return
            self._late = LATE * (1 + num_turns // LATER_TURNS)
            self.point()
            turn()
        self._give_up()
        raise Stuck(self.stuck)

    def _give_up(self) -> None:
        self.stuck = "; ".join(f"{host.name} waits for {host.awaited}" for host in self._hosts if host.awaits is not None)

    def end_all(self) -> None:
        """Lets all other threads end, once none could go on."""
        while self.num_running:
            self._go_on()
        self.errors = [error for error in self.errors if not isinstance(error, Stuck)]

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
        self.acquire()

    def __exit__(self, *error: object) -> None:
        self.release()

    def acquire(self, timeout: float = -1.0) -> bool:
        while self._holder is not None:  # whoever is told that it is free may find it taken again
            if not self._schedule.wait(lambda: self._holder is None, "a lock", timeout >= 0.0):
                return False
        self._holder = self._schedule.host
        self._holder.clock.join(self._clock)
        return True

    def release(self) -> None:
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


class KeptEvent:
    """Stands in for a threading.Event that stays set. A wait for it may also end at its limit."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule, self._is_set, self._clock = schedule, False, Clock()

    def set(self) -> None:
        self._clock.join(self._schedule.host.clock)
        self._schedule.host.tick()
        self._is_set = True

    def wait(self, timeout: float) -> bool:
        if not self._schedule.wait(lambda: self._is_set, "an event", is_limited=True):
            return False
        self._schedule.host.clock.join(self._clock)
        return True


class Queue:
    """Stands in for a queue.SimpleQueue. Who gets an item knows what its giver knew."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule, self._items = schedule, deque[tuple[Any, Clock]]()

    def put(self, item: Any) -> None:
        self._items.append((item, Clock(self._schedule.host.clock)))
        self._schedule.host.tick()
        self._schedule.point()

    def get(self) -> Any:
        while not self._schedule.wait(lambda: bool(self._items), "an item of a queue"):
            pass
        item, clock = self._items.popleft()
        self._schedule.host.clock.join(clock)
        return item


class Thread:
    """Stands in for a thread of a Schedule."""

    def __init__(self, schedule: Schedule, target: Callable[..., None], args: tuple[Any, ...], name: str) -> None:
        self._schedule, self._target, self._args = schedule, target, args
        self.host = Host(name, Clock())
        self.host.device = schedule.host.device

    def start(self) -> None:
        self._schedule.start(self.host, lambda: self._target(*self._args))

    def join(self, timeout: float | None = None) -> None:
        self._schedule.join(self.host)

    def is_alive(self) -> bool:
        return not self.host.ended
