"""Checks all engines every few seconds and kills those that hang. Their death is then handled like that of an engine that crashed.
Engines that are in a long step are reported to the scheduler."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping

from daemon.engines.engine_watch import LONG_STEP_S, EngineWatch
from daemon.engines.workers import EngineWorker
from daemon.metrics.counters import Metrics
from daemon.process.logs import fields
from daemon.record.event_ring import EventRing
from engine.loop.pulse import Pulse
from scheduler.node.events import Event, StepLasts

log = logging.getLogger("hearthd.engine")


class EngineRounds:
    """Finds engines of a node that hang (EngineWatch), and kills and restarts them, with timers on the event loop. stall_s: returns
    the setting engine_stall_s, the seconds that an engine may give no sign of life; 0: no engine is killed. post: passes an event
    to the scheduler; once a second it gets a StepLasts for each engine that is in a long step."""

    def __init__(
        self,
        workers: Mapping[str, EngineWorker],
        stall_s: Callable[[], float],
        ring: EventRing,
        metrics: Metrics,
        post: Callable[[Event], None],
    ) -> None:
        self._workers, self._stall_s, self._ring, self._metrics, self._post = workers, stall_s, ring, metrics, post
        self._watch = EngineWatch(time.monotonic())
        self._timer: asyncio.TimerHandle | None = None
        self._steps_timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self._watch = EngineWatch(time.monotonic())
        self._arm()
        self._tell_steps()

    def stop(self) -> None:
        for timer in (self._timer, self._steps_timer):
            if timer is not None:
                timer.cancel()
        self._timer = self._steps_timer = None

    def problem(self, device: str) -> str:
        """Returns a text for operators if the device's engine has given no sign of life for suspiciously long, otherwise ""."""
        worker = self._workers[device]
        pulse = worker.pulse()
        return "" if pulse is None else self._watch.problem(device, time.monotonic(), worker.pid, pulse, self._stall_s())

    def _arm(self) -> None:
        # the loop's timers have a resolution of milliseconds: a timer early by less would fire again and again
        delay_s = max(0.0, self._watch.due_s - time.monotonic()) + 0.001
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._look)

    def _pulses(self) -> dict[str, tuple[int, Pulse]]:
        return {name: (worker.pid, pulse) for name, worker in self._workers.items() if (pulse := worker.pulse()) is not None}

    def _tell_steps(self) -> None:
        now = time.monotonic()
        for device, since in self._watch.long_steps(now, self._pulses()).items():
            self._post(StepLasts(now=now, cause=f"engine-{device}", device=device, since=since))
        self._steps_timer = asyncio.get_running_loop().call_later(LONG_STEP_S, self._tell_steps)

    def _look(self) -> None:
        for device, silence in self._watch.look(time.monotonic(), self._pulses(), self._stall_s()).items():
            text = "engine hangs: %s (allowed are %.0f s); it is killed, its requests go on"
            log.error(text, silence, silence.limit_s, extra=fields(device=device))
            self._metrics.engine_stalls[device] += 1
            self._ring.add("engine_hangs", device=device, reason=str(silence))
            self._workers[device].restart_stuck(f"gave {silence}")
        self._arm()
