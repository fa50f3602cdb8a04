"""Tells when something changed in one of many folders, each watched by itself.

A recursive watch would follow links wherever they lead, to all of the file system if one leads to `/`: the folders are those that
the last scan has looked into.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Iterable

log = logging.getLogger("hearthd.models")
DEBOUNCE_MS, STEP_MS = 300, 150  # step: also how often the thread wakes to look whether it is to stop
POLL_MS = 2000  # where the kernel gives no watches
AGAIN_S = 1.0  # after a folder was gone before its watch began
JOIN_S = 2.0


class FolderWatch:
    """Calls `changed` on the loop some 0.3 s after something happened in one of the folders. Made on the loop."""

    def __init__(self, changed: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._changed = changed
        self._folders: frozenset[str] = frozenset()
        self._stopped, self._replaced = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None

    def look_at(self, folders: Iterable[str]) -> None:
        """Watches these instead. What happened in a new one before has no event of its own, so `changed` is called for it."""
        found = frozenset(folders)
        if found == self._folders or self._stopped.is_set():
            return
        self._folders = found
        self._replaced.set()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="watch models", daemon=True)
            self._thread.start()
        self._changed()

    def stop(self) -> None:
        """Blocks until the thread has seen it: for a thread."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join(JOIN_S)

    def is_set(self) -> bool:
        """Whether the watch under way is to end, as watchfiles asks it."""
        return self._stopped.is_set() or self._replaced.is_set()

    def _run(self) -> None:
        polling = False
        while not self._stopped.is_set():
            self._replaced.clear()
            folders = [folder for folder in self._folders if os.path.isdir(folder)]
            if not folders:
                self._replaced.wait(AGAIN_S)
                continue
            try:
                self._watch(folders, polling)
            except FileNotFoundError:
                self._stopped.wait(AGAIN_S)  # gone just now; a scan will leave it out
            except (OSError, RuntimeError) as error:
                if polling:
                    log.warning("the models folder cannot be watched (%s); `hearth reload` looks again", error)
                    return
                polling = True
                log.warning("the models folder cannot be watched (%s); it is polled from now on", error)

    def _watch(self, folders: list[str], polling: bool) -> None:
        """Until `is_set`. Raises OSError, RuntimeError."""
        from watchfiles import watch

        options = {
            "debounce": DEBOUNCE_MS,
            "step": STEP_MS,
            "rust_timeout": 0,
            "raise_interrupt": False,
            "recursive": False,
            "ignore_permission_denied": True,
            "force_polling": polling,
            "poll_delay_ms": POLL_MS,
        }
        for _ in watch(*folders, watch_filter=None, stop_event=self, **options):  # type: ignore[arg-type]
            if not self.is_set():
                self._loop.call_soon_threadsafe(self._changed)
