"""Assigns the ids of calls in Kimi K2's dialect: `functions.NAME:INDEX`, where INDEX counts a conversation's calls from 0.

The chat template shows a call and its result by the id alone, so an id in another form would lose the function's name.
"""

from __future__ import annotations

import re

PREFIX = "functions."
_NUMBERED = re.compile(r"functions\.([a-zA-Z0-9_.-]+):([0-9]{1,6})")


class CallNumbers:
    """Assigns an id to each call of a conversation, in order. first: the number of the first call. next: the least number that the
    next call may get."""

    __slots__ = ("next",)

    def __init__(self, first: int = 0) -> None:
        self.next = first

    def id_of(self, name: str, written: str) -> str:
        """Returns the id of the next call, which is a call of the function `name`. written: the id that the model wrote, "" for
        none. If that id has the right form and names the function, and its number is not below `next`, the number is kept;
        otherwise the call gets the number `next`. So no two calls have the same id."""
        match = _NUMBERED.fullmatch(written)
        number = int(match[2]) if match is not None and match[1] == name else -1
        number = max(number, self.next)
        self.next = number + 1
        return f"{PREFIX}{name}:{number}"
