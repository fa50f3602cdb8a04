"""Keeps the tenants' use of today's limits over a restart: usage.json in the state folder, written periodically and at the stop."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from daemon.record import whole_file
from daemon.record.saved_object import DamagedFile, entries, field, saved_object

log = logging.getLogger("hearthd.state")
VERSION = 1
SAVE_EVERY_S = 30.0
_NUMBER = "a whole number of at least 0"


class DayUsage(NamedTuple):
    """The tokens that tenants used on one day. day: the number of days from 1970-01-01 to it, in UTC. tokens: tenant -> number of
    tokens."""

    day: int
    tokens: Mapping[str, int]


NO_USAGE = DayUsage(0, {})


class UsageFile:
    """Saves the tenants' use of one day to a file, on the event loop. now: returns the current use, or None while no tenant has a
    daily limit."""

    def __init__(self, folder: str, now: Callable[[], DayUsage | None]) -> None:
        self._path, self._now = Path(folder) / "usage.json", now
        self._saved = NO_USAGE
        self._problem = ""
        self._lock = asyncio.Lock()

    def load(self) -> DayUsage:
        """Returns the use that an earlier process has saved; NO_USAGE if there is no file, or, with a warning, if it cannot be
        read."""
        try:
            values = saved_object(self._path.read_bytes(), VERSION)
            tokens = entries(values, "tokens", _is_number, _NUMBER)
            if not _is_number(day := field(values, "day")):
                raise DamagedFile(f"key day: must be {_NUMBER}")
            self._saved = DayUsage(day, tokens)
        except FileNotFoundError:
            pass
        except (OSError, DamagedFile) as error:
            why = f"cannot be read: {error.strerror}" if isinstance(error, OSError) else f"cannot be used: {error}"
            log.warning("%s %s; it is ignored: the tokens of today's limits count from 0", self._path, why)
        return self._saved

    async def run(self) -> None:
        """Calls `save` every SAVE_EVERY_S, until cancelled."""
        while True:
            await asyncio.sleep(SAVE_EVERY_S)
            await self.save()

    async def save(self) -> None:
        """Saves the current use if it differs from what was saved last. A failure is logged once, and the next call tries again."""
        async with self._lock:
            now = self._now()
            if now is None or now == self._saved:
                return
            now = DayUsage(now.day, dict(now.tokens))
            data = json.dumps({"version": VERSION, **now._asdict()}, indent=1, sort_keys=True).encode() + b"\n"
            try:
                await asyncio.to_thread(whole_file.write, self._path, data)
            except OSError as error:
                problem = error.strerror or str(error)
                if problem != self._problem:
                    log.error("%s is not saved: %s; a restart would forget the tokens used today since then", self._path, problem)
                self._problem = problem
                return
            if self._problem:
                log.info("%s is saved again", self._path)
            self._saved, self._problem = now, ""


def _is_number(value: Any) -> bool:
    return type(value) is int and value >= 0
