"""Reports when one of a few files may have changed: edited in place, replaced, or reached through a link that moved."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Sequence

log = logging.getLogger("hearthd.config")
DEBOUNCE_MS, STEP_MS = 300, 150

Signature = tuple[tuple[int, int, int] | None, ...]


def signature(paths: Sequence[str]) -> Signature:
    """Returns a value that changes when the content of a file may have changed. A file that does not exist is None in it."""
    found: list[tuple[int, int, int] | None] = []
    for path in paths:
        try:
            stat = os.stat(path)
        except OSError:
            found.append(None)
        else:
            found.append((stat.st_mtime_ns, stat.st_size, stat.st_ino))
    return tuple(found)


class FileWatch:
    """Calls `changed` on the event loop some 0.3 s after something happened in a folder of `paths`. Compare `signature` to see
    whether it was one of the files. It watches folders, not files, because an editor may write a new file under the same name."""

    def __init__(self, paths: Sequence[str], changed: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._changed = changed
        self._folders = sorted({os.path.dirname(one) for path in paths for one in (os.path.abspath(path), os.path.realpath(path))})
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch settings", daemon=True)
        if self._folders:
            self._thread.start()

    def _run(self) -> None:
        from watchfiles import watch

        options = {"debounce": DEBOUNCE_MS, "step": STEP_MS, "rust_timeout": 0, "raise_interrupt": False, "recursive": False}
        try:
            for _ in watch(*self._folders, watch_filter=None, stop_event=self._stop, **options):  # type: ignore[arg-type]
                if not self._stop.is_set():
                    self._loop.call_soon_threadsafe(self._changed)
        except (OSError, RuntimeError) as error:
            if not self._stop.is_set():
                log.warning("%s cannot be watched (%s); `hearth reload` reads again", ", ".join(self._folders), error)

    def stop(self) -> None:
        """Stops watching. It blocks until the watching thread has noticed, so call it from a thread."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(2.0)
