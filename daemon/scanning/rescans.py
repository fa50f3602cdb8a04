"""Decides when the models folder is scanned again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from daemon.process.shortage import SHORTAGE
from daemon.scanning.scanner import ModelScanner
from loader.files import open_files

log = logging.getLogger("hearthd.models")
# Waits after a change: if a folder is made and filled at once, its watch may begin too late for some of its content, and then no
# further event comes.
LOOK_AGAIN_S = (1.0, 3.0, 10.0)


class Rescans:
    """Calls `rescan`, which scans the models folder: after each change in the folder, several times in the seconds after a change,
    and when a path that did not answer in an earlier scan is to be examined again. While the folder cannot be read, `rescan` is
    called every few seconds, because no change is reported when a file system is mounted again."""

    def __init__(self, rescan: Callable[[], Awaitable[None]], scanner: ModelScanner) -> None:
        self._rescan, self._scanner = rescan, scanner
        self._changed = asyncio.Event()
        self._again: list[float] = []
        self._problem = ""  # why the folder cannot be read

    def problems(self) -> list[str]:
        """Returns a list for `hearth status`: a sentence on why the models folder cannot be read; [] if it can."""
        return [self._problem] if self._problem else []

    def changed(self) -> None:
        self._changed.set()

    async def run(self) -> None:
        while True:
            waits = [*self._again[:1], *([due] if (due := self._scanner.look_again_in_s) is not None else [])]
            try:
                await asyncio.wait_for(self._changed.wait(), min(waits, default=None))
                self._again = list(LOOK_AGAIN_S)
            except TimeoutError:
                del self._again[:1]
            self._changed.clear()
            try:
                await self._rescan()
            except OSError as error:
                if self._scanner.is_closed:
                    return
                self._again = self._again or [LOOK_AGAIN_S[-1]]
                if open_files.are_used_up(error):
                    SHORTAGE.note("scans of the models folder put off")
                    continue
                problem = f"models_dir {error.filename} cannot be read ({error.strerror}): the models stay as they are"
                if problem != self._problem:
                    log.error("the models folder cannot be read (%s): the models stay as they are", error)
                self._problem = problem
            else:
                if self._problem:
                    log.info("the models folder can be read again")
                self._problem = ""
