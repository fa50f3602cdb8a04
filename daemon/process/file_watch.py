"""Reports when one of a few files may have changed: edited in place, replaced, or reached through a link that moved."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

from loader.threads import Thread

log = logging.getLogger("hearthd.config")
DEBOUNCE_MS, STEP_MS = 300, 150
PAUSE_S, MOST_LOOKS = 0.2, 25

T = TypeVar("T")


async def settled(look: Callable[[], Awaitable[T]]) -> T:
    """Returns what `look` finds, a signature of files, once it has found the same twice, PAUSE_S apart: a file that is written in
    place is empty for a moment. Returns what it finds the last of MOST_LOOKS times if that differs each time."""
    found = await look()
    for _ in range(MOST_LOOKS - 1):
        await asyncio.sleep(PAUSE_S)
        before, found = found, await look()
        if found == before:
            break
    return found


def folders_of(paths: Iterable[str]) -> frozenset[str]:
    """Returns the folders to watch for changes of the files: those of the paths, because an editor may replace a file or a link by
    a new one, and those of the files that links lead to."""
    return frozenset(os.path.dirname(one) for path in paths for one in (os.path.abspath(path), os.path.realpath(path)))


class FileWatch:
    """Watches folders from a thread, and calls `changed` on the event loop some 0.3 s after something happened in one of them.
    Calls it once, too, when the watch has begun, because of changes before that. The callee compares signatures (file_signature.py)
    to find out whether a file has changed. Must be made on the event loop.

    is_stale: whether a new watch is needed, because a folder was removed or replaced, or this watch failed."""

    def __init__(self, folders: Iterable[str], changed: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._changed = changed
        self.folders = frozenset(folders)
        self.is_stale = False
        self._stop = threading.Event()
        self._in_place = False
        self._thread = Thread(target=self._run, name="watch settings")
        if self.folders:
            try:
                self._thread.start()
            except MemoryError as error:
                self._failed(error)

    def is_set(self) -> bool:
        """Returns whether the watch is to end. The library watchfiles is given this object in place of a threading.Event, and calls
        the method again and again while it watches. The first call shows that the watch has begun, so `changed` is called then."""
        if not self._in_place:
            self._in_place = True
            self._tell()
        return self._stop.is_set()

    def _run(self) -> None:
        from watchfiles import watch

        options = {"debounce": DEBOUNCE_MS, "step": STEP_MS, "rust_timeout": 0, "raise_interrupt": False, "recursive": False}
        try:
            for changes in watch(*self.folders, watch_filter=None, stop_event=self, **options):  # type: ignore[arg-type]
                self.is_stale = self.is_stale or any(path in self.folders for _, path in changes)
                self._tell()
        except (OSError, RuntimeError) as error:
            self._failed(error)

    def _failed(self, error: Exception) -> None:
        self.is_stale = True
        if not self._stop.is_set():
            log.warning("%s cannot be watched (%s); `hearth reload` reads again", ", ".join(sorted(self.folders)), error)

    def _tell(self) -> None:
        if not self._stop.is_set():
            self._loop.call_soon_threadsafe(self._changed)

    def stop(self) -> None:
        """Stops watching. Blocks for up to 2 s, until the watching thread has ended, so call it from a thread."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(2.0)
