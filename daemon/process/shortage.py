"""Handles the shortage of file descriptors: errors for clients, and lines for the log."""

from __future__ import annotations

import logging
import time
from collections import Counter

from daemon.errors import NotNow
from loader.files import open_files

log = logging.getLogger("hearthd")
TELL_EVERY_S = 60.0
RETRY_AFTER_S = 1.0


class Shortage:
    """Counts operations that failed because the process has no free file descriptor, and logs the counts. It logs at most one line
    a minute, because a shortage lasts and each request would add a line."""

    def __init__(self) -> None:
        self._untold: Counter[str] = Counter()
        self._told_s = -TELL_EVERY_S

    def note(self, what: str) -> None:
        """Counts a failure for lack of descriptors. Logs all counts since the last line, unless that line is less than a minute
        old. what: the operations that failed, as a plural noun, such as "requests answered 503"."""
        self._untold[what] += 1
        now = time.monotonic()
        if now - self._told_s < TELL_EVERY_S:
            return
        self._told_s = now
        counts = ", ".join(f"{number} {each}" for each, number in self._untold.items())
        self._untold.clear()
        log.error(
            "open files are short, the limit is %d: %s; raise it with LimitNOFILE= in the unit or `ulimit -n` before the start",
            open_files.limit(),
            counts,
        )


SHORTAGE = Shortage()  # one per process, like the limit


def overloaded() -> NotNow:
    """Returns the error (503) for a client whose request finds no free file descriptor."""
    message = "The server has too many connections and files open for this request. Send it again in a moment."
    return NotNow("overloaded", message, retry_after_s=RETRY_AFTER_S)


def in_place_of(error: Exception) -> NotNow | None:
    """Returns the error (503) with which to answer a request that failed with `error`, if `error` means that the process has no
    free file descriptor, and counts that failure; otherwise returns None."""
    if not isinstance(error, OSError) or not open_files.are_used_up(error):
        return None
    SHORTAGE.note("requests answered 503")
    return overloaded()
