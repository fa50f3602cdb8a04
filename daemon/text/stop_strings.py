"""Finds stop strings in text that arrives in pieces, and holds back text that could still become one."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Searches one reply for stop strings. `add` returns the text that may be sent and sets `found` if a stop string ended the
    reply. The stop string itself is never returned."""

    __slots__ = ("_held", "_longest", "_stops", "found")

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._longest = max(map(len, self._stops))
        self._held = ""
        self.found = ""  # the stop string that ended the text

    @property
    def matched(self) -> bool:
        return bool(self.found)

    def add(self, text: str) -> str:
        text = self._held + text
        found = [(at, -len(stop), stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            at, _, self.found = min(found)
            self._held = ""
            return text[:at]
        keep = self._num_held(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def end(self) -> str:
        """Returns the text that was held back because it could have become a stop string. Called at the end of the reply."""
        held, self._held = self._held, ""
        return held

    def _num_held(self, text: str) -> int:
        """Returns the length of the longest suffix of `text` that is the beginning of a stop string."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            tail = text[len(text) - length :]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0
