"""Logs where each thread of the daemon is when the event loop has been blocked for long. Otherwise a daemon that hangs would leave
no trace of the reason. The report is written before systemd's watchdog, if there is one, ends the daemon."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
from types import FrameType

from loader.threads import Thread

log = logging.getLogger("hearthd")
BEAT_S = 2.5  # how often the loop shows that it turns, and a thread looks whether it has
STALL_S = 10.0
LATE_S = 1.0  # a thread that wakes later than this was stopped itself, together with the loop
MOST_FRAMES = 16  # of a thread


class StallReport:
    """Watches the event loop on which it is made, from a thread of its own. If the loop runs nothing for STALL_S seconds, that is
    logged once, and again when the loop goes on. Raises OSError if the system allows no further thread."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._beat_s = time.monotonic()  # when the loop last showed that it turns
        self._is_told = False  # whether the present stall is in the log
        self._ended = threading.Event()
        self._thread = Thread(target=self._run, name="stall report")
        try:
            self._thread.start()
        except MemoryError as error:
            raise OSError(str(error)) from None
        self._timer = self._loop.call_later(BEAT_S, self._beat)

    def close(self) -> None:
        self._timer.cancel()
        self._ended.set()
        self._thread.join()

    def _beat(self) -> None:
        now = time.monotonic()
        if self._is_told:
            log.warning("the event loop goes on after %.1f s", now - self._beat_s)
        self._beat_s, self._is_told = now, False
        self._timer = self._loop.call_later(BEAT_S, self._beat)

    def _run(self) -> None:
        slept_from_s = time.monotonic()
        while not self._ended.wait(BEAT_S):
            now = time.monotonic()
            if now - slept_from_s < BEAT_S + LATE_S:
                self._look(now)
            slept_from_s = time.monotonic()

    def _look(self, now: float) -> None:
        stood_s = now - self._beat_s
        if stood_s < STALL_S or self._is_told:
            return
        self._is_told = True
        log.error("the event loop has stood still for %.0f s; the next lines say where each thread is", stood_s)
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        for ident, frame in sys._current_frames().items():
            if ident != self._thread.ident:
                log.error("thread %s: %s", names.get(ident, ident), _place(frame))


def _place(frame: FrameType | None) -> str:
    """Returns the functions that a thread is in, innermost first, each with its file and line."""
    places: list[str] = []
    while frame is not None and len(places) < MOST_FRAMES:
        places.append(f"{frame.f_code.co_name} ({frame.f_code.co_filename}:{frame.f_lineno})")
        frame = frame.f_back
    return ", called by ".join(places)
