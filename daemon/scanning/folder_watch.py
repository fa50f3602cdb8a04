"""Reports changes in many folders, each of which is watched by itself.

A recursive watch would follow links wherever they lead, to all of the file system if one leads to `/`. So only the folders that the
last scan has looked into are watched.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterable

from loader.threads import Thread

log = logging.getLogger("hearthd.models")
DEBOUNCE_MS, STEP_MS = 300, 150  # STEP_MS is also how often the thread looks whether it is to stop
POLL_MS = 2000  # if the kernel gives no watches
AGAIN_S = 1.0  # wait before the next try, if a folder disappeared before its watch began
JOIN_S = 2.0


class FolderWatch:
    """Calls `changed` on the event loop about 0.3 s after a file was added, changed or removed in one of the watched folders, while
    `run` runs. `look_at` sets the folders. The object must be made on the event loop."""

    def __init__(self, changed: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._changed = changed
        self._folders: frozenset[str] = frozenset()
        self._stopped, self._replaced = threading.Event(), threading.Event()
        self._thread: Thread | None = None
        self._polling = False

    async def run(self) -> None:
        """Watches the folders until `stop` is called. Calls `changed` once at the beginning, because of changes before the watch.
        Raises OSError or RuntimeError if the folders can be neither watched nor polled, MemoryError if there is no memory for the
        thread that does it."""
        ended: asyncio.Future[None] = self._loop.create_future()
        thread = Thread(target=self._run, args=(ended,), name="watch models")
        try:
            thread.start()
        finally:
            self._changed()  # without a watch, too: who calls `run` again and again then sees changes as often
        self._thread = thread
        await ended

    def look_at(self, folders: Iterable[str]) -> None:
        """Watches these folders instead of the earlier ones, and calls `changed` once if they differ, because changes before the
        new watch begins are not reported."""
        found = frozenset(folders)
        if found == self._folders or self._stopped.is_set():
            return
        self._folders = found
        self._replaced.set()
        self._changed()

    def stop(self) -> None:
        """Stops watching. Blocks until the thread has ended, at most JOIN_S seconds, so it must not be called on the event loop."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join(JOIN_S)

    def is_set(self) -> bool:
        """Returns whether the current watch is to end, because of `stop` or because the folders were replaced. The library
        watchfiles gets this object as its stop event."""
        return self._stopped.is_set() or self._replaced.is_set()

    def _run(self, ended: asyncio.Future[None]) -> None:
        """Watches the folders until `stop`; the main function of the thread. ended: a future of the event loop, which gets the
        exception that ended the watch, or None."""
        problem: Exception | None = None
        try:
            self._watch_on()
        except Exception as error:
            problem = error

        def tell() -> None:
            if not ended.done():
                ended.set_exception(problem) if problem is not None else ended.set_result(None)

        with contextlib.suppress(RuntimeError):  # the event loop is closed
            self._loop.call_soon_threadsafe(tell)

    def _watch_on(self) -> None:
        """Watches the folders of the last `look_at` until `stop`; polls them if the kernel gives no watches. Raises OSError or
        RuntimeError if polling fails, too."""
        while not self._stopped.is_set():
            self._replaced.clear()
            folders = [folder for folder in self._folders if os.path.isdir(folder)]
            if not folders:
                self._replaced.wait(AGAIN_S)
                continue
            try:
                self._watch(folders)
            except FileNotFoundError:
                self._stopped.wait(AGAIN_S)  # a folder has just disappeared; the next scan leaves it out
            except (OSError, RuntimeError) as error:
                if self._polling:
                    raise
                self._polling = True
                log.warning("the models folder cannot be watched (%s); it is polled from now on", error)

    def _watch(self, folders: list[str]) -> None:
        """Watches these folders, but not the folders inside them, and reports changes to the event loop. Returns when `stop` was
        called or `look_at` has replaced the folders. Raises OSError or RuntimeError if they cannot be watched."""
        from watchfiles import watch

        options = {
            "debounce": DEBOUNCE_MS,
            "step": STEP_MS,
            "rust_timeout": 0,
            "raise_interrupt": False,
            "recursive": False,
            "ignore_permission_denied": True,
            "force_polling": self._polling,
            "poll_delay_ms": POLL_MS,
        }
        for _ in watch(*folders, watch_filter=None, stop_event=self, **options):  # type: ignore[arg-type]
            if not self.is_set():
                self._loop.call_soon_threadsafe(self._changed)
