"""Reads one value of Gemma 4's calls while it is being written, and passes it on as JSON: an object, a list, a string between
`<|"|>`, or a bare word. Keys and strings have no escapes.
"""

from __future__ import annotations

import json
import re

from daemon.text.tool_parsers.bracket_value import WORD, BracketValue
from daemon.text.tool_parsers.pieces import find_marker
from daemon.text.tool_parsers.python_value import scalar_as_json

QUOTE = '<|"|>'
KEY = r"""[^\x00-\x20,:{}\[\]<"]"""  # a character of a key that stands without quotes
MOST_KEY = 256  # characters of a key
_KEY_RUN = re.compile(f"{KEY}*")
_BARE_RUN = re.compile(r'[^,{}\[\]<"]*')

# further states of BracketValue: what is expected within a string or another word
_KEY, _QUOTE, _STRING, _BARE = range(WORD, WORD + 4)


class GemmaValue(BracketValue):
    """The state of reading one value from text that arrives in pieces. A bare word that is no number, boolean or null is taken as a
    string, because models leave the quotes out at times."""

    __slots__ = ("_held", "_read")

    def __init__(self) -> None:
        super().__init__()
        self._read = ""  # the characters of the current quote, key or bare word so far
        self._held = ""  # the end of a string's text, if it may be the start of a quote

    def _in_word(self, text: str, at: int, out: list[str]) -> int:
        expected = self._expected
        if expected == _STRING:
            return self._string(text, at, out)
        if expected == _BARE:
            return self._bare(text, at, out)
        return self._key(text, at, out) if expected == _KEY else self._quote(text[at], at, out)

    def _word(self, char: str, at: int, out: list[str]) -> int:
        self._read = ""
        self._expected = _QUOTE if char == QUOTE[0] else _KEY if self._in_key else _BARE
        return at

    def _quote(self, char: str, at: int, out: list[str]) -> int:
        """Reads a character of the quote before a string. Returns the index of the first unread character."""
        self._read += char
        self.bad = not QUOTE.startswith(self._read)
        if self._read == QUOTE:
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
            self._key_ended()
        else:
            self._value_ended()
        return end

    def _key(self, text: str, at: int, out: list[str]) -> int:
        match = _KEY_RUN.match(text, at)
        assert match is not None
        self._read += match[0]
        self.bad = len(self._read) > MOST_KEY
        if match.end() < len(text):
            self.bad |= not self._read
            self._begin(json.dumps(self._read, ensure_ascii=False), out)
            self._key_ended()
        return match.end()

    def _bare(self, text: str, at: int, out: list[str]) -> int:
        match = _BARE_RUN.match(text, at)
        assert match is not None
        self._read += match[0]
        if match.end() < len(text):
            word = self._read.strip()
            self.bad = not word or not self._open or text[match.end()] not in ",}]"
            self._begin(scalar_as_json(word) or json.dumps(word, ensure_ascii=False), out)
            self._value_ended()
        return match.end()


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]
