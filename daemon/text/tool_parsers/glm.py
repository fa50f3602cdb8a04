"""The dialect of GLM-4.5 and later: `<tool_call>NAME`, then `<arg_key>KEY</arg_key>` and `<arg_value>VALUE</arg_value>` for each
argument, and `</tool_call>`; any number of calls, with text between them. GLM-4.5 and 4.6 write the parts on lines of their own,
GLM-4.7 without line breaks.

Values are JSON, but strings stand as they are, without quotes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from daemon.text.tool_parsers.call import NAME
from daemon.text.tool_parsers.dialect import DialectParser
from daemon.text.tool_parsers.hermes import CLOSE, OPEN
from daemon.text.tool_parsers.parameter_types import ANY, ParameterTypes
from daemon.text.tool_parsers.pieces import Piece
from daemon.text.tool_parsers.text_call import MOST_KEY, TextCall, types_by_tool

KEY, END_KEY = "<arg_key>", "</arg_key>"
VALUE, END_VALUE = "<arg_value>", "</arg_value>"
OTHER_TAG = "<tool_sep>"  # of Hunyuan's dialect, which otherwise has the same tags
_NAME_CHARACTER = re.compile(r"[a-zA-Z0-9_.-]")
_MOST_NAME = 128  # characters

_NAME, _TAG, _KEY = range(3)  # what is expected next outside of values
_AFTER_NAME, _AFTER_KEY, _AFTER_VALUE = (KEY, CLOSE), (VALUE,), (KEY, CLOSE, OPEN)


class _ArgumentCall(TextCall):
    """Reads a call of GLM's dialect from the function's name to `</tool_call>`. If that tag is missing, the call ends where the
    next call begins, or at the end of the reply. has_next: whether the call ended at the marker of the next call, which was
    read."""

    end_value = END_VALUE
    undeclared = ANY

    __slots__ = ("_key", "_name", "_state", "has_next")

    def __init__(self, index: int, lead: str, tools: Mapping[str, ParameterTypes]) -> None:
        super().__init__(index, lead, tools)
        self._state = _NAME
        self._tags = _AFTER_NAME
        self._name = self._key = ""
        self.has_next = False

    def finish(self, out: list[Piece]) -> bool:
        if self._tags != _AFTER_VALUE or self._state != _TAG or self._in_value or self._word:
            return False
        self._end_arguments(out)
        return True

    def _step(self, char: str, at: int, out: list[Piece]) -> int:
        if self._state == _TAG:
            return self._tag(char, at, out)
        if self._state == _KEY:
            return self._in_key(char, at)
        if _NAME_CHARACTER.match(char):
            self._name += char
            self.bad = len(self._name) > _MOST_NAME
        elif self._name:
            self._state = _TAG
            return at
        else:
            self.bad = char not in " \t\r\n"
        return at if self.bad else at + 1

    def _take(self, tag: str, out: list[Piece]) -> None:
        if not self.announced:
            self.bad = not NAME.fullmatch(self._name)
            if self.bad:
                return
            self._begin_arguments(self._name, out)
        if tag == KEY:
            self._state = _KEY
        elif tag == VALUE:
            self._tags = _AFTER_VALUE
            self._begin_value(self._key, out)
        else:
            self.has_next = tag == OPEN
            self._end_arguments(out)

    def _in_key(self, char: str, at: int) -> int:
        self._word += char
        key, bracket, tag = self._word.partition("<")
        if bracket + tag == END_KEY:
            self._key, self._word = key, ""
            self._state, self._tags = _TAG, _AFTER_KEY
        self.bad = not END_KEY.startswith(bracket + tag) or len(key) > MOST_KEY or "\n" in key or (bool(bracket) and not key)
        return at if self.bad else at + 1


class GlmParser(DialectParser):
    """Parses replies in GLM's dialect. names: the offered tools. schemas: the schema of each tool's parameters, as JSON, in the
    order of `names`."""

    marker = OPEN

    def __init__(self, names: Sequence[str], schemas: Sequence[bytes]) -> None:
        super().__init__()
        self._types = types_by_tool(names, schemas)

    def opened(self) -> None:
        self._next(self.lead)

    def after(self, text: str, at: int, out: list[Piece]) -> int:
        self.no_call()
        return at

    def _next(self, lead: str) -> None:
        self.begin(_ArgumentCall(self.num_calls, lead, self._types))

    def _in_call(self, text: str, at: int, out: list[Piece]) -> int:
        call = self._call
        at = super()._in_call(text, at, out)
        if isinstance(call, _ArgumentCall) and call.has_next:
            self._next(OPEN)
        return at
