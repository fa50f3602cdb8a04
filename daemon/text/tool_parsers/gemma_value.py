"""Reads one value of Gemma 4's calls while it is being written, and passes it on as JSON: an object, a list, a string between
`<|"|>`, or a bare word. Keys and strings have no escapes.
"""

from __future__ import annotations

import json
import re

from daemon.text.tool_parsers.pieces import find_marker
from daemon.text.tool_parsers.python_value import SPACES, scalar_as_json

QUOTE = '<|"|>'
KEY = r"""[^\x00-\x20,:{}\[\]<"]"""  # a character of a key that stands without quotes
MOST_KEY = 256  # characters of a key
_KEY_RUN = re.compile(f"{KEY}*")
_BARE_RUN = re.compile(r'[^,{}\[\]<"]*')
_CLOSING = {"[": "]", "{": "}"}

# what is expected next
_VALUE, _ITEM_OR_END, _KEY_OR_END, _KEY, _COLON, _COMMA_OR_END, _QUOTE, _STRING, _BARE = range(9)


class GemmaValue:
    """The state of reading one value from text that arrives in pieces. done: whether the value is complete. bad: whether the text
    is no value. Once one of them is true, `feed` reads nothing more. A bare word that is no number, boolean or null is taken as a
    string, because models leave the quotes out at times."""

    __slots__ = ("_before", "_expected", "_held", "_in_key", "_open", "_word", "bad", "done")

    def __init__(self) -> None:
        self._open: list[str] = []  # the closing brackets that are still to come
        self._before = ""  # a JSON comma that is held back until another item follows
        self._expected = _VALUE
        self._in_key = False
        self._word = ""  # the characters of the current quote, key or bare word so far
        self._held = ""  # the end of a string's text, if it may be the start of a quote
        self.done = self.bad = False

    def feed(self, text: str, at: int, out: list[str]) -> int:
        """Reads text[at:] up to the end of the value or the first character that does not belong to one. Adds what was read to
        `out`, as JSON, and returns the index of the first character that was not read."""
        while at < len(text) and not (self.done or self.bad):
            expected = self._expected
            if expected == _STRING:
                at = self._string(text, at, out)
            elif expected == _BARE:
                at = self._bare(text, at, out)
            elif expected == _KEY:
                at = self._key(text, at, out)
            elif expected == _QUOTE:
                at = self._quote(text[at], at, out)
            elif text[at] in SPACES:
                at += 1
            else:
                at = self._structure(text[at], at, out)
        return at

    def _structure(self, char: str, at: int, out: list[str]) -> int:
        expected = self._expected
        if expected in (_ITEM_OR_END, _KEY_OR_END, _COMMA_OR_END) and char == self._open[-1]:
            self._before = ""
            out.append(self._open.pop())
            self._value_ended()
        elif expected == _COMMA_OR_END:
            self.bad = char != ","
            self._before = ", "
            self._expected = _KEY_OR_END if self._open[-1] == "}" else _ITEM_OR_END
        elif expected == _COLON:
            self.bad = char != ":"
            out.append(": ")
            self._expected = _VALUE
        elif char in _CLOSING and expected != _KEY_OR_END:
            self._begin(char, out)
            self._open.append(_CLOSING[char])
            self._expected = _KEY_OR_END if char == "{" else _ITEM_OR_END
        else:
            self._in_key, self._word = expected == _KEY_OR_END, ""
            self._expected = _QUOTE if char == QUOTE[0] else _KEY if self._in_key else _BARE
            return at
        return at if self.bad else at + 1

    def _quote(self, char: str, at: int, out: list[str]) -> int:
        """Reads a character of the quote before a string. Returns the index of the first unread character."""
        self._word += char
        self.bad = not QUOTE.startswith(self._word)
        if self._word == QUOTE:
            self._begin('"', out)
            self._held, self._expected = "", _STRING
        return at if self.bad else at + 1

    def _string(self, text: str, at: int, out: list[str]) -> int:
        value = self._held + text[at:]
        found, is_whole = find_marker(value, 0, QUOTE)
        if found:
            out.append(_escaped(value[:found]))
        if not is_whole:
            self._held = value[found:]
            return len(text)
        end, self._held = at + found + len(QUOTE) - len(self._held), ""
        out.append('"')
        if self._in_key:
            self._expected = _COLON
        else:
            self._value_ended()
        return end

    def _key(self, text: str, at: int, out: list[str]) -> int:
        match = _KEY_RUN.match(text, at)
        assert match is not None
        self._word += match[0]
        self.bad = len(self._word) > MOST_KEY
        if match.end() < len(text):
            self.bad |= not self._word
            self._begin(json.dumps(self._word, ensure_ascii=False), out)
            self._expected = _COLON
        return match.end()

    def _bare(self, text: str, at: int, out: list[str]) -> int:
        match = _BARE_RUN.match(text, at)
        assert match is not None
        self._word += match[0]
        if match.end() < len(text):
            word = self._word.strip()
            self.bad = not word or not self._open or text[match.end()] not in ",}]"
            self._begin(scalar_as_json(word) or json.dumps(word, ensure_ascii=False), out)
            self._value_ended()
        return match.end()

    def _begin(self, written: str, out: list[str]) -> None:
        out.append(self._before + written)
        self._before = ""

    def _value_ended(self) -> None:
        self._expected = _COMMA_OR_END
        self.done = not self._open and not self.bad


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]
