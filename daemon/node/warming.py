"""Loads models ahead of their requests, at the times that their setting `warm` names.

The node scheduler loads such a model only if the load can begin at once and no model in use has to leave for it. If the scheduler
refuses because the model does not fit or its device is busy, it is asked again for some minutes."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from datetime import datetime
from typing import Protocol

from config import warm
from config.schema import NodeConfig
from daemon.node.warm_times import WarmTimes, next_of
from daemon.process.logs import fields
from daemon.process.long_tasks import LongTasks
from daemon.record.event_ring import EventRing
from scheduler.node import events
from scheduler.node.actions import Refusal

log = logging.getLogger("hearthd.warm")
TRY_FOR_S = 600.0
FIRST_RETRY_S, LONGEST_RETRY_S = 0.25, 15.0
LOOK_EVERY_S = 10.0
AGAIN = ("would_not_fit", "busy")  # refusal codes after which it is worth trying again


class CommandPort(Protocol):
    """The part of the Dispatcher that Warming uses: `command` posts an event to the node scheduler and returns its refusal, or None
    if the event was carried out."""

    def command(self, make: Callable[[float, str], events.Event], kind: str = ...) -> asyncio.Future[Refusal | None]: ...


class Warming:
    """Loads models ahead of their requests, as their setting `warm` says. problems: model -> why its last load ahead has not
    succeeded."""

    def __init__(
        self,
        config: Callable[[], NodeConfig],
        dispatcher: CommandPort,
        tasks: LongTasks,
        ring: EventRing,
        clock: Callable[[], datetime] = datetime.now,
    ) -> None:
        """config: returns the current settings. dispatcher: passes the loads to the node scheduler. ring: takes an event for a
        model that could not be loaded. clock: returns the host's local time."""
        self._config, self._dispatcher, self._tasks, self._ring, self._clock = config, dispatcher, tasks, ring, clock
        self.problems: dict[str, str] = {}
        self._trying: set[str] = set()
        self._times: WarmTimes | None = None

    async def run(self) -> None:
        """Loads the models whose setting `warm` says that they are loaded at the daemon's start, and then, until cancelled, every
        model at its times of day. Called when the node listens; if it is called again after a failure, the loads at the start are
        not repeated."""
        if self._times is None:
            self._times = WarmTimes(self._clock())
            for name, model in self._config().models.items():
                if warm.is_at_start(model.warm):
                    self.begin(name, "at the start")
        while True:
            now = self._clock()
            wanted = [(name, at) for name, model in self._config().models.items() for at in warm.times(model.warm)]
            for name, at in self._times.due(wanted, now):
                self.begin(name, f"at {at:%H:%M}")
            upcoming = next_of((at for _, at in wanted), now)
            left_s = LOOK_EVERY_S if upcoming is None else (upcoming - now).total_seconds()
            await asyncio.sleep(min(LOOK_EVERY_S, max(0.05, left_s)))

    def begin(self, name: str, when: str) -> None:
        """Starts to load a model in the background, unless that is under way, and tries again for up to TRY_FOR_S while the model
        cannot be loaded. when: the time in words, for the log."""
        if name not in self._trying:
            self._trying.add(name)
            self._tasks.once(f"loading {name} ahead", self._try(name, when))

    async def _try(self, name: str, when: str) -> None:
        try:
            refusal = await self._load(name, when)
        finally:
            self._trying.discard(name)
        if refusal is None:
            self.problems.pop(name, None)
            log.info("%s is loaded, as its setting warm wants it %s", name, when, extra=fields(model=name))
            return
        self.problems[name] = f"not loaded ahead {when}: {refusal.message}"
        log.warning("%s was %s", name, self.problems[name], extra=fields(model=name))
        self._ring.add("not_warmed", model=name, reason=self.problems[name])

    async def _load(self, name: str, when: str) -> Refusal | None:
        give_up_s, wait_s = time.monotonic() + TRY_FOR_S, FIRST_RETRY_S
        while True:
            refusal = await self._dispatcher.command(
                lambda now, cause: events.WarmRequested(now=now, cause=cause, model=name), "warm"
            )
            if refusal is None or refusal.code not in AGAIN or time.monotonic() + wait_s > give_up_s:
                return refusal
            self.problems[name] = f"not loaded ahead {when} so far: {refusal.message}"
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, LONGEST_RETRY_S)

    def lines(self, name: str) -> list[str]:
        """Returns the lines of `hearth why` about a model's loads ahead: its times, and why the last load failed. [] if there is
        nothing to say."""
        model = self._config().models.get(name)
        lines = []
        if model is not None and model.warm is not None:
            times, now = warm.times(model.warm), self._clock()
            named = [*(["the start"] if warm.is_at_start(model.warm) else []), *(f"{at:%H:%M}" for at in times)]
            upcoming = next_of(times, now)
            wait = "" if upcoming is None else f", next in {(upcoming - now).total_seconds() // 60:.0f} min"
            tried = "; being tried now" if name in self._trying else ""
            lines.append(f"is loaded ahead at {', '.join(named)} (warm){wait}{tried}")
        return [*lines, self.problems[name]] if name in self.problems else lines
