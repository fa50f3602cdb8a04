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
    """The tokens that were used on one day. day: its number since 1970, in UTC. tokens: by tenant."""

    day: int
    tokens: Mapping[str, int]


NO_USAGE = DayUsage(0, {})


class UsageFile:
    """Saves a DayUsage, on the event loop. now: returns the current one, or None while no tenant has a daily limit."""

    def __init__(self, folder: str, now: Callable[[], DayUsage | None]) -> None:
        self._path, self._now = Path(folder) / "usage.json", now
        self._saved = NO_USAGE
        self._problem = ""
        self._lock = asyncio.Lock()

    def load(self) -> DayUsage:
        """Returns the usage that an earlier process has saved. A file that cannot be read counts as missing, with a warning."""
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
        """Saves changes every SAVE_EVERY_S."""
        while True:
            await asyncio.sleep(SAVE_EVERY_S)
            await self.save()

    async def save(self) -> None:
        """Saves the usage if it has changed. A failure is logged once, and saving is tried again the next time."""
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
