"""Follows one JSON value through text that arrives in pieces, and finds where it ends or where it stops being JSON (RFC 8259)."""

from __future__ import annotations

import re

_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_SPACES = re.compile(r"[ \t\r\n]*")
_SCALAR_RUN = re.compile(r"[-+.0-9A-Za-z]*")
_SCALAR = re.compile(r"true|false|null|-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")

# what is expected next
_VALUE, _VALUE_OR_END, _KEY, _KEY_OR_END, _COLON, _COMMA_OR_END, _STRING, _ESCAPE, _HEX, _SCALAR_REST = range(10)


class JsonValue:
    """The state of reading one JSON value from text that arrives in pieces. done: whether the value is complete. bad: whether the
    text is not JSON. Once one of them is true, `feed` reads nothing more."""

    __slots__ = ("_expected", "_in_key", "_num_hex", "_open", "_scalar", "bad", "done")

    def __init__(self) -> None:
        self._open: list[str] = []  # the opening brackets that are not closed yet
        self._expected = _VALUE
        self._in_key = False
        self._num_hex = 0
        self._scalar: list[str] = []
        self.done = self.bad = False

    def feed(self, text: str, at: int) -> int:
        """Reads text[at:] up to the end of the value or the first character that is not JSON, and returns the index of the first
        character that was not read."""
        while at < len(text) and not (self.done or self.bad):
            expected = self._expected
            if expected == _STRING:
                at = self._string(text, at)
            elif expected == _SCALAR_REST:
                at = self._scalar_rest(text, at)
            elif expected in (_ESCAPE, _HEX):
                at = self._escape(text, at)
            elif text[at] in " \t\r\n":
                at = _end(_SPACES, text, at)
            else:
                at = self._structure(text[at], at)
        return at

    def _string(self, text: str, at: int) -> int:
        at = _end(_PLAIN, text, at)
        if at == len(text):
            return at
        if text[at] == '"':
            if self._in_key:
                self._in_key, self._expected = False, _COLON
            else:
                self._value_ended()
        elif text[at] == "\\":
            self._expected = _ESCAPE
        else:
            self.bad = True
            return at
        return at + 1

    def _escape(self, text: str, at: int) -> int:
        char = text[at]
        if self._expected == _HEX:
            self.bad = char not in "0123456789abcdefABCDEF"
            self._num_hex -= 1
            self._expected = _HEX if self._num_hex else _STRING
        elif char == "u":
            self._expected, self._num_hex = _HEX, 4
        else:
            self.bad = char not in '"\\/bfnrt'
            self._expected = _STRING
        return at if self.bad else at + 1

    def _scalar_rest(self, text: str, at: int) -> int:
        end = _end(_SCALAR_RUN, text, at)
        self._scalar.append(text[at:end])
        if end < len(text):
            if _SCALAR.fullmatch("".join(self._scalar)):
                self._scalar.clear()
                self._value_ended()
            else:
                self.bad = True
        return end

    def _structure(self, char: str, at: int) -> int:
        expected = self._expected
        if expected in (_VALUE, _VALUE_OR_END):
            if char == '"':
                self._expected = _STRING
            elif char in "{[":
                self._open.append(char)
                self._expected = _KEY_OR_END if char == "{" else _VALUE_OR_END
            elif char in "-0123456789tfn":
                self._expected = _SCALAR_REST
                return at
            elif char == "]" and expected == _VALUE_OR_END:
                self._close()
            else:
                self.bad = True
        elif expected in (_KEY, _KEY_OR_END):
            if char == '"':
                self._expected, self._in_key = _STRING, True
            elif char == "}" and expected == _KEY_OR_END:
                self._close()
            else:
                self.bad = True
        elif expected == _COLON:
            self._expected, self.bad = _VALUE, char != ":"
        elif char == ",":
            self._expected = _KEY if self._open[-1] == "{" else _VALUE
        elif char == ("}" if self._open[-1] == "{" else "]"):
            self._close()
        else:
            self.bad = True
        return at if self.bad else at + 1

    def _close(self) -> None:
        self._open.pop()
        self._value_ended()

    def _value_ended(self) -> None:
        self._expected = _COMMA_OR_END
        self.done = not self._open


def _end(pattern: re.Pattern[str], text: str, at: int) -> int:
    match = pattern.match(text, at)
    assert match is not None  # all these patterns also match the empty string
    return match.end()
