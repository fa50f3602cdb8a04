"""The dialect of Qwen3-Coder: `<tool_call><function=NAME><parameter=KEY>VALUE</parameter>…</function></tool_call>`, any number of
them, with text between them. A line break on either side of a value is no part of it.

Values are plain text; the tool's schema says what they are in JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from daemon.text.tool_parsers.call import NAME, Call
from daemon.text.tool_parsers.dialect import DialectParser
from daemon.text.tool_parsers.hermes import CLOSE, OPEN
from daemon.text.tool_parsers.parameter_types import STRING, ParameterTypes, as_json
from daemon.text.tool_parsers.pieces import ARGUMENTS, CALL_END, CONTENT, Piece, find_marker

FUNCTION, END_FUNCTION = "<function=", "</function>"
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"
_MOST_KEY = 256  # characters

_TAG, _NAME, _KEY, _VALUE = range(4)  # what is expected next


class _FunctionCall(Call):
    """Reads a call from `<function=` to `</function>`. names: of a call without `<tool_call>`, the only ones that count. None:
    any."""

    __slots__ = ("_held", "_is_first", "_is_fresh", "_names", "_state", "_tags", "_tools", "_types", "_value_types", "_word")

    def __init__(self, index: int, lead: str, tools: Mapping[str, ParameterTypes], names: frozenset[str] | None) -> None:
        super().__init__(index, lead)
        self._tools, self._names = tools, names
        self._state = _TAG
        self._tags: tuple[str, ...] = (FUNCTION,)  # that may come
        self._word = ""  # of a tag, name or key so far
        self._types = ParameterTypes()  # of the function that was named
        self._is_first = True  # no parameter was read
        self._value_types: frozenset[str] = STRING
        self._held = ""  # of the value, not passed on yet
        self._is_fresh = False  # nothing of the value was read

    def _read(self, text: str, at: int, out: list[Piece]) -> int:
        while at < len(text) and not (self.done or self.bad):
            if self._state == _VALUE:
                at = self._value(text, at, out)
            elif self._state == _TAG:
                at = self._tag(text[at], at, out)
            else:
                at = self._name(text[at], at, out)
        return at

    def _tag(self, char: str, at: int, out: list[Piece]) -> int:
        if not self._word and char in " \t\r\n":
            return at + 1
        tag = self._word + char
        if not any(each.startswith(tag) for each in self._tags):
            self.bad = True
            return at
        self._word = tag
        if tag in self._tags:
            self._word = ""
            if tag == END_FUNCTION:
                out += [Piece(ARGUMENTS, "}", self._index), Piece(CALL_END, "", self._index)]
                self.done = True
            else:
                self._state = _NAME if tag == FUNCTION else _KEY
        return at + 1

    def _name(self, char: str, at: int, out: list[Piece]) -> int:
        """Reads the name of the function or of a parameter, up to the bracket."""
        if char != ">":
            self._word += char
            self.bad = char == "\n" or len(self._word) > _MOST_KEY
            return at if self.bad else at + 1
        word, self._word = self._word, ""
        if self._state == _NAME:
            self.bad = not NAME.fullmatch(word) or (self._names is not None and word not in self._names)
            if self.bad:
                return at
            self._announce(word, out)
            self._types = self._tools.get(word, self._types)
            self._state, self._tags = _TAG, (PARAMETER, END_FUNCTION)
            begin = "{"
        else:
            self.bad = not word
            if self.bad:
                return at
            begin = f"{'' if self._is_first else ', '}{json.dumps(word, ensure_ascii=False)}: "
            self._is_first = False
            self._value_types = self._types.of(word)
            self._state, self._held, self._is_fresh = _VALUE, "", True
            begin += '"' if self._value_types == STRING else ""
        out.append(Piece(ARGUMENTS, begin, self._index))
        return at + 1

    def _value(self, text: str, at: int, out: list[Piece]) -> int:
        """Reads the value. A string's text is passed on as it arrives."""
        value = self._held + text[at:]
        found, is_whole = find_marker(value, 0, END_PARAMETER)
        end = at + found + len(END_PARAMETER) - len(self._held) if is_whole else len(text)
        if self._is_fresh and value:
            self._is_fresh = False
            if value[0] == "\n":
                value, found = value[1:], found - 1
        body, is_string = value[:found], self._value_types == STRING
        if is_whole or is_string:
            body = body.removesuffix("\n")
        if is_whole:
            self._state, self._held = _TAG, ""
            written = _escaped(body) + '"' if is_string else as_json(body, self._value_types)
        elif is_string:
            self._held, written = value[len(body) :], _escaped(body)
        else:
            self._held, written = value, ""
        if written:
            out.append(Piece(ARGUMENTS, written, self._index))
        return end


class Qwen3CoderParser(DialectParser):
    """Parses replies in this dialect. names: the tools offered; only calls of them need no `<tool_call>`, which these models leave
    out at times. schemas: of each tool's parameters, as JSON."""

    marker = OPEN

    def __init__(self, names: Sequence[str], schemas: Sequence[bytes]) -> None:
        super().__init__()
        self._names = frozenset(names)
        self._types = {name: ParameterTypes(schema) for name, schema in zip(names, schemas, strict=False)}

    def content(self, text: str, at: int, out: list[Piece]) -> int:
        places = [(*find_marker(text, at, each), each) for each in (OPEN, FUNCTION)]
        found, is_whole, marker = min(places, key=lambda place: (place[0], not place[1]))
        if self.lead or found > at:
            out.append(Piece(CONTENT, self.lead + text[at:found]))
            self.lead = ""
        if not is_whole:
            self.held = text[found:]
            return len(text)
        if marker == FUNCTION:
            self.begin(_FunctionCall(self.num_calls, "", self._types, self._names))
            return found
        self.lead = marker
        self.opened()
        return found + len(marker)

    def opened(self) -> None:
        self.begin(_FunctionCall(self.num_calls, self.lead, self._types, None))

    def after(self, text: str, at: int, out: list[Piece]) -> int:
        return self.closed(CLOSE, text, at)


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]
