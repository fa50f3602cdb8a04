"""The node's latest events, for `hearth events` and for commands that wait: a bounded history, and followers of new events."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

HISTORY = 2048
Follower = Callable[[dict[str, Any]], None]


class EventRing:
    """Keeps the latest HISTORY events and passes new ones to followers. An event is a flat dict: `time` (Unix seconds), `event`
    (its kind: state, load_progress, engine, registered, ...), and the fields that describe it."""

    def __init__(self) -> None:
        self._history: deque[dict[str, Any]] = deque(maxlen=HISTORY)
        self._followers: list[Follower] = []

    def add(self, event: str, keep: bool = True, **fields: Any) -> None:
        """Adds an event of the kind `event` with these fields, and passes it to the followers. keep: whether it goes into the
        history; False for the many events of progress."""
        entry = {"time": round(time.time(), 3), "event": event, **fields}
        if keep:
            self._history.append(entry)
        for follower in list(self._followers):
            follower(entry)

    def history(self) -> list[dict[str, Any]]:
        return list(self._history)

    def follow(self, follower: Follower) -> Callable[[], None]:
        """Calls `follower` with every new event from now on, until the returned function is called. The follower must not block,
        because it runs on the event loop."""
        self._followers.append(follower)

        def stop() -> None:
            if follower in self._followers:
                self._followers.remove(follower)

        return stop
