"""Keeps the tenants' use of today's limits over a restart: usage.json in the state folder, written periodically and at the stop."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from daemon.record import whole_file

log = logging.getLogger("hearthd.state")
VERSION = 1
SAVE_EVERY_S = 30.0


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
            values = json.loads(self._path.read_bytes())
            if values["version"] != VERSION:
                raise ValueError(f"version {values['version']} is not {VERSION}")
            tokens = values["tokens"]
            if not all(type(number) is int and number >= 0 for number in (values["day"], *tokens.values())):
                raise ValueError("a number is none, or below 0")
            self._saved = DayUsage(values["day"], dict(tokens))
        except FileNotFoundError:
            pass
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            log.warning(
                "%s cannot be read (%s: %s): the tokens of today's limits count from 0", self._path, type(error).__name__, error
            )
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
