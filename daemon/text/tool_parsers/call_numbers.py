"""The ids of calls in Kimi K2's dialect: `functions.NAME:INDEX`, where INDEX counts a conversation's calls from 0.

The chat template shows a call and its result by the id alone, so that an id of another form would take the function's name away.
"""

from __future__ import annotations

import re

PREFIX = "functions."
_NUMBERED = re.compile(r"functions\.([a-zA-Z0-9_.-]+):([0-9]{1,6})")


class CallNumbers:
    """Gives each call of a conversation its id, in their order. next: the number that the next call has, or a greater one."""

    __slots__ = ("next",)

    def __init__(self, first: int = 0) -> None:
        self.next = first

    def id_of(self, name: str, written: str) -> str:
        """Returns the id of the next call. written: the id that it has so far, "" for none; it is kept if it is of this form, names
        the function and its number was not passed before, so that no two calls share one."""
        match = _NUMBERED.fullmatch(written)
        number = int(match[2]) if match is not None and match[1] == name else -1
        number = max(number, self.next)
        self.next = number + 1
        return f"{PREFIX}{name}:{number}"
