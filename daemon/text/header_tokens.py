"""Tracks which tokens of a Harmony reply belong to message headers, in which stop strings are not searched for."""

from __future__ import annotations

from collections.abc import Mapping

from daemon.text.tool_parsers.harmony import CHANNEL, CONSTRAIN, START


class HeaderTokens:
    """Tracks message headers in one Harmony reply, token by token. marks: the format's special tokens, token id -> the character
    that stands for it (daemon/text/tool_parsers/harmony.py)."""

    __slots__ = ("_inside", "_marks")

    def __init__(self, marks: Mapping[int, str]) -> None:
        self._marks = marks
        self._inside = False

    def covers(self, token_id: int) -> bool:
        """Takes the next token and returns whether it belongs to a header or ends a message."""
        mark = self._marks.get(token_id)
        if mark is None:
            return self._inside
        # the other special tokens end a header or a message; <|constrain|> is a part of a header
        self._inside = mark in (START, CHANNEL) or (self._inside and mark == CONSTRAIN)
        return True
