"""Defines the pieces into which a reply's text is split (content, reasoning, and the parts of tool calls), and ToolParser, the
interface of the parsers that split it. Also contains functions with which parsers find markers in a text."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Protocol

CONTENT, REASONING, CALL, ARGUMENTS, CALL_END, BROKEN = range(6)


class Piece(NamedTuple):
    """A part of a reply, of one of these kinds. CONTENT and REASONING carry text. CALL announces a call, ARGUMENTS carries a part
    of its JSON as generated, and CALL_END says that the call was well formed. BROKEN withdraws a call that was announced but whose
    arguments turned out not to be JSON; the text after such a call is CONTENT."""

    kind: int
    # CONTENT, REASONING, ARGUMENTS: the text · CALL: the function's name · BROKEN: all the text of the call, markers included
    text: str = ""
    call: int = 0  # index of the call in the reply, from 0
    call_id: str = ""  # CALL: the id that the model wrote, "" for none


class ToolParser(Protocol):
    """The parser of one reply, which arrives in pieces of text. However the reply is divided, the result is the same, except that
    CONTENT and ARGUMENTS are divided where the text is."""

    def add(self, text: str) -> list[Piece]: ...

    def end(self, cut: bool) -> list[Piece]:
        """Returns the pieces that were still held back. Called at the end of the reply. cut: whether the reply ended at max_tokens;
        an unfinished call then does not count as malformed."""
        ...


def find_marker(text: str, at: int, marker: str) -> tuple[int, bool]:
    """Looks for `marker` from text[at] on. Returns (index, True) if it is there. Otherwise returns (index, False), where
    text[index:] is an end of the text that may be the beginning of the marker; the index is len(text) if there is no such end."""
    found = text.find(marker, at)
    if found >= 0:
        return found, True
    start = max(at, len(text) - len(marker) + 1)
    while (start := text.find(marker[0], start)) >= 0:
        if marker.startswith(text[start:]):
            return start, False
        start += 1
    return len(text), False


def find_first_marker(text: str, at: int, markers: Iterable[str]) -> tuple[int, bool, str]:
    """Looks for several markers from text[at] on. Returns (index, whether it is complete, marker) for the marker that comes first,
    as find_marker finds it."""
    places = ((*find_marker(text, at, marker), marker) for marker in markers)
    return min(places, key=lambda place: (place[0], not place[1]))


def skip_spaces(text: str, at: int) -> int:
    """Returns the index of the first character from `at` on that is not JSON white space."""
    while at < len(text) and text[at] in " \t\r\n":
        at += 1
    return at
