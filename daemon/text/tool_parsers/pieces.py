"""What a reply's text is taken apart into."""

from __future__ import annotations

from typing import NamedTuple, Protocol

CONTENT, REASONING, CALL, ARGUMENTS, CALL_END, BROKEN = range(6)


class Piece(NamedTuple):
    """CALL announces a call, ARGUMENTS carries a part of its JSON as generated, CALL_END says it was well formed. BROKEN withdraws
    a call that was announced: its arguments turned out to be no JSON; what follows it in the text comes as CONTENT."""

    kind: int
    # CONTENT, REASONING, ARGUMENTS: the text · CALL: the function's name · BROKEN: all the text of the call, markers included
    text: str = ""
    call: int = 0  # which call of the reply, from 0


class ToolParser(Protocol):
    """One reply's state. The pieces do not depend on how the text was cut, but for the cuts between CONTENT or ARGUMENTS."""

    def add(self, text: str) -> list[Piece]: ...

    def end(self, cut: bool) -> list[Piece]:
        """What was held back. `cut`: the reply ended at max_tokens, so an unfinished call is no malformed one."""
        ...


def find_marker(text: str, at: int, marker: str) -> tuple[int, bool]:
    """(where the marker begins, True), else (where an end of `text` begins that may yet become one or len(text), False)."""
    found = text.find(marker, at)
    if found >= 0:
        return found, True
    start = max(at, len(text) - len(marker) + 1)
    while (start := text.find(marker[0], start)) >= 0:
        if marker.startswith(text[start:]):
            return start, False
        start += 1
    return len(text), False


def skip_spaces(text: str, at: int) -> int:
    """The index of the first character from `at` on that is no JSON white space."""
    while at < len(text) and text[at] in " \t\r\n":
        at += 1
    return at
