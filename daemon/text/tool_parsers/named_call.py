"""Reads a call of Mistral's newer models: `name[ARGS]{…}`, `name[CALL_ID]id[ARGS]{…}` or `name{…}`."""

from __future__ import annotations

import re

from daemon.text.tool_parsers.call import NAME, Call
from daemon.text.tool_parsers.json_value import JsonValue
from daemon.text.tool_parsers.pieces import Piece

ARGS, CALL_ID = "[ARGS]", "[CALL_ID]"
_NAME_RUN = re.compile(r"[a-zA-Z0-9_.-]*")
_NAME, _MARK, _ID, _BRACE, _ARGUMENTS = range(5)


class NamedCall(Call):
    __slots__ = ("_expected", "_mark", "_name", "_value")

    def __init__(self, index: int, lead: str) -> None:
        super().__init__(index, lead)
        self._expected = _NAME
        self._name = self._mark = ""
        self._value = JsonValue()

    def _read(self, text: str, at: int, out: list[Piece]) -> int:
        while at < len(text) and not (self.done or self.bad):
            if self._expected == _ARGUMENTS:
                at = self._last_arguments(self._value, text, at, out)
            elif self._expected in (_NAME, _ID):
                at = self._word(text, at)
            elif self._expected == _MARK:
                at = self._in_mark(text[at], at)
            elif text[at] in " \t\r\n":
                at += 1
            elif text[at] == "{" and NAME.fullmatch(self._name):
                self._announce(self._name, out)
                self._expected = _ARGUMENTS
            else:
                self.bad = True
        return at

    def _word(self, text: str, at: int) -> int:
        """Reads characters of the function's name, which ends at `[` or `{`, or of the call's id, which ends at `[`. The id is
        dropped, because hearthd makes ids of its own. Returns the index of the first unread character."""
        match = _NAME_RUN.match(text, at)
        assert match is not None
        if self._expected == _NAME:
            self._name += match[0]
            self.bad = len(self._name) > 128
        if match.end() < len(text):
            self._expected = _MARK if text[match.end()] == "[" else _BRACE
            self.bad |= self._expected == _BRACE and self._mark == CALL_ID
        return match.end()

    def _in_mark(self, char: str, at: int) -> int:
        wanted = ARGS if self._mark.startswith(CALL_ID) else ""
        mark = self._mark.removeprefix(CALL_ID) + char
        if not any(each.startswith(mark) for each in ((wanted,) if wanted else (ARGS, CALL_ID))):
            self.bad = True
            return at
        self._mark = CALL_ID + mark if wanted else mark
        if mark == ARGS:
            self._expected = _BRACE
        elif mark == CALL_ID:
            self._expected = _ID
        return at + 1
