"""Reads one Python literal while it is being written, and passes it on as JSON: strings, numbers, True, False, None, lists, and
dicts whose keys are strings. JSON's own true, false and null are read, too. Nothing is evaluated.
"""

from __future__ import annotations

import json
import math
import re
import unicodedata

from daemon.text.tool_parsers.bracket_value import WORD, BracketValue

_TO_QUOTE = {quote: re.compile(rf"[^{quote}\\]*") for quote in "\"'"}
_SCALAR_RUN = re.compile(r"[-+.0-9A-Za-z_]*")
_JSON_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_FLOAT = re.compile(r"[-+]?(?:[0-9_]*\.[0-9_]*(?:[eE][-+]?[0-9_]+)?|[0-9_]+[eE][-+]?[0-9_]+)")
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
# `\/` is JSON's; in Python a backslash before any other character belongs to the text
_ESCAPES = dict(zip("abfnrtv\\'\"/", "\a\b\f\n\r\t\v\\'\"/", strict=True)) | {"\n": ""}
_HEX_ESCAPES = {"x": 2, "u": 4, "U": 8}  # what follows the backslash -> digits
_OCTAL, _HEX = "01234567", "0123456789abcdefABCDEF"
_MOST_ESCAPE = 128  # characters of \N{…}

# further states of BracketValue: what is expected within a string or another word
_QUOTES, _STRING, _ESCAPE, _SCALAR = range(WORD, WORD + 4)


class PythonValue(BracketValue):
    """The state of reading one Python literal from text that arrives in pieces."""

    __slots__ = ("_escape", "_is_triple", "_num_quotes", "_quote", "_scalar")

    def __init__(self) -> None:
        super().__init__()
        self._quote = ""  # the opening quote of the string being read
        self._is_triple = False
        self._num_quotes = 0  # quotes read at the string's start, or in a row inside a triple-quoted string
        self._escape = ""  # characters read after the backslash
        self._scalar: list[str] = []

    def _in_word(self, text: str, at: int, out: list[str]) -> int:
        expected = self._expected
        if expected == _STRING:
            return self._string(text, at, out)
        if expected == _SCALAR:
            return self._scalar_rest(text, at, out)
        if expected == _ESCAPE:
            return self._in_escape(text[at], at, out)
        return self._quotes(text[at], at, out)

    def _word(self, char: str, at: int, out: list[str]) -> int:
        if char in _TO_QUOTE:
            self._quote, self._num_quotes, self._expected = char, 1, _QUOTES
            self._begin('"', out)
            return at + 1
        self.bad = self._in_key or not _SCALAR_RUN.fullmatch(char)
        self._expected = _SCALAR
        return at

    def _scalar_rest(self, text: str, at: int, out: list[str]) -> int:
        match = _SCALAR_RUN.match(text, at)
        assert match is not None
        self._scalar.append(match[0])
        if match.end() < len(text):
            written = scalar_as_json("".join(self._scalar))
            self._scalar.clear()
            self.bad = written is None
            if written is not None:
                self._begin(written, out)
                self._value_ended()
        return match.end()

    # ---- strings

    def _quotes(self, char: str, at: int, out: list[str]) -> int:
        """Reads further quotes after a string's opening quote: a second quote ends an empty string, unless a third one follows,
        which opens a triple-quoted string. Any other character is left unread. Returns the index of the first unread character."""
        if char == self._quote and self._num_quotes < 3:
            self._num_quotes += 1
            return at + 1
        if self._num_quotes == 2:
            self._string_ended(out)
        else:
            self._is_triple, self._num_quotes, self._expected = self._num_quotes == 3, 0, _STRING
        return at

    def _string(self, text: str, at: int, out: list[str]) -> int:
        match = _TO_QUOTE[self._quote].match(text, at)
        assert match is not None
        at = match.end()
        if match[0] or (at < len(text) and text[at] == "\\"):  # the quotes before this text did not end the string
            out.append(_escaped(self._quote * self._num_quotes + match[0]))
            self._num_quotes = 0
        if at == len(text):
            return at
        if text[at] == "\\":
            self._escape, self._expected = "", _ESCAPE
        else:
            self._num_quotes += 1
            if self._num_quotes == (3 if self._is_triple else 1):
                self._string_ended(out)
        return at + 1

    def _string_ended(self, out: list[str]) -> None:
        out.append('"')
        if self._in_key:
            self._key_ended()
        else:
            self._value_ended()

    def _in_escape(self, char: str, at: int, out: list[str]) -> int:
        """Reads the next character of an escape sequence, after its backslash. When the sequence is complete, adds the character
        that it stands for to `out`. Returns the index of the first unread character."""
        kind = self._escape[:1]
        if kind and kind in _OCTAL and char not in _OCTAL:
            self._escape_ended(chr(int(self._escape, 8)), out)
            return at
        self._escape += char
        if not kind:
            if char not in _HEX_ESCAPES and char not in _OCTAL and char != "N":
                self._escape_ended(_ESCAPES.get(char, "\\" + char), out)
        elif kind in _OCTAL:
            if len(self._escape) == 3:
                self._escape_ended(chr(int(self._escape, 8)), out)
        elif kind == "N":
            self.bad = self._escape[1] != "{" or len(self._escape) > _MOST_ESCAPE
            if char == "}":
                self._escape_ended(_named_character(self._escape[2:-1]), out)
        else:
            self.bad = char not in _HEX
            if not self.bad and len(self._escape) > _HEX_ESCAPES[kind]:
                code = int(self._escape[1:], 16)
                self._escape_ended(chr(code) if code <= 0x10FFFF else None, out)
        return at if self.bad else at + 1

    def _escape_ended(self, text: str | None, out: list[str]) -> None:
        if text is None:
            self.bad = True
        else:
            out.append(_escaped(text))
            self._expected = _STRING


def _escaped(text: str) -> str:
    """Returns a text as the inside of a JSON string. An unpaired surrogate, which UTF-8 cannot encode, is written as a \\u
    escape."""
    return json.dumps(text, ensure_ascii=len(text) == 1 and "\ud800" <= text <= "\udfff")[1:-1]


def _named_character(name: str) -> str | None:
    try:
        return unicodedata.lookup(name)
    except KeyError:
        return None


def scalar_as_json(word: str) -> str | None:
    """Returns a number, or one of the words True, False, None, true, false and null, as JSON; None if `word` is no such literal, or
    the number is not finite."""
    if word in _WORDS:
        return _WORDS[word]
    if _JSON_NUMBER.fullmatch(word):
        return word
    try:
        return str(int(word, 0))
    except ValueError:
        pass
    try:
        number = float(word) if _FLOAT.fullmatch(word) else math.nan
    except ValueError:
        return None
    return repr(number) if math.isfinite(number) else None
