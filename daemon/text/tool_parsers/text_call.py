"""Reads a call whose arguments are plain text between tags, and passes them on as a JSON object. The tool's schema gives the JSON
type of each value.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Mapping, Sequence

from daemon.text.tool_parsers.call import Call
from daemon.text.tool_parsers.parameter_types import STRING, ParameterTypes, as_json
from daemon.text.tool_parsers.pieces import ARGUMENTS, CALL_END, Piece, find_marker

MOST_KEY = 256  # characters


def types_by_tool(names: Sequence[str], schemas: Sequence[bytes]) -> dict[str, ParameterTypes]:
    """Returns the JSON types of each tool's parameters, by the tool's name. names: the offered tools. schemas: the schema of each
    tool's parameters, as JSON, in the same order."""
    return {name: ParameterTypes(schema) for name, schema in zip(names, schemas, strict=False)}


class TextCall(Call):
    """The state of reading a call with arguments between tags. tools: the parameter types of the offered tools.

    Subclasses define `_step`, which reads names, and `_take`, which acts on a tag; `_tag` reads the characters of tags for them.
    They also define `end_value`, the tag that ends a value; `undeclared`, the types of a parameter that no schema names; and
    `has_lines`, whether line breaks next to a value are not part of it."""

    end_value: str
    undeclared = STRING
    has_lines = False

    __slots__ = ("_held", "_in_value", "_is_first", "_is_fresh", "_tags", "_tools", "_types", "_value_types", "_word")

    def __init__(self, index: int, lead: str, tools: Mapping[str, ParameterTypes]) -> None:
        super().__init__(index, lead)
        self._tools = tools
        self._types = ParameterTypes()  # parameter types of the called function
        self._tags: tuple[str, ...] = ()  # the tags that are allowed next
        self._word = ""  # the characters of the current tag, name or key so far
        self._is_first = True  # whether no parameter was read yet
        self._in_value = False
        self._value_types: frozenset[str] = STRING
        self._held = ""  # text of the value that was not passed on yet
        self._is_fresh = False  # whether nothing of the value was read yet

    @abstractmethod
    def _step(self, char: str, at: int, out: list[Piece]) -> int:
        """Reads text[at], a character outside of values. Returns `at` + 1, or `at` if the character must be read again."""

    @abstractmethod
    def _take(self, tag: str, out: list[Piece]) -> None:
        """Handles a tag that was read completely, and sets the tags that are allowed after it. Adds the pieces of the call that the
        tag completes to `out`."""

    def _tag(self, char: str, at: int, out: list[Piece]) -> int:
        """Reads a character of a tag, or of the white space before it, and calls `_take` when the tag is complete. Sets `bad` if
        none of the tags that are allowed next begins with the characters read so far. Returns the index of the first unread
        character."""
        if not self._word and char in " \t\r\n":
            return at + 1
        tag = self._word + char
        if not any(each.startswith(tag) for each in self._tags):
            self.bad = True
            return at
        self._word = tag
        if tag in self._tags:
            self._word = ""
            self._take(tag, out)
        return at + 1

    def _read(self, text: str, at: int, out: list[Piece]) -> int:
        while at < len(text) and not (self.done or self.bad):
            at = self._value(text, at, out) if self._in_value else self._step(text[at], at, out)
        return at

    def _begin_arguments(self, name: str, out: list[Piece]) -> None:
        self._announce(name, out)
        self._types = self._tools.get(name, self._types)
        out.append(Piece(ARGUMENTS, "{", self._index))

    def _begin_value(self, key: str, out: list[Piece]) -> None:
        self._value_types = self._types.of(key, self.undeclared)
        begin = key_as_json(key, self._is_first)
        out.append(Piece(ARGUMENTS, begin + ('"' if self._value_types == STRING else ""), self._index))
        self._is_first, self._in_value, self._held, self._is_fresh = False, True, "", True

    def _end_arguments(self, out: list[Piece]) -> None:
        out += [Piece(ARGUMENTS, "}", self._index), Piece(CALL_END, "", self._index)]
        self.done = True

    def _value(self, text: str, at: int, out: list[Piece]) -> int:
        """Reads text[at:] up to the tag that ends the value of an argument. The text of a string is passed on as it arrives, any
        other value when it is complete. Returns the index of the first unread character."""
        value = self._held + text[at:]
        found, is_whole = find_marker(value, 0, self.end_value)
        end = at + found + len(self.end_value) - len(self._held) if is_whole else len(text)
        if self._is_fresh and value:
            self._is_fresh = False
            if self.has_lines and value[0] == "\n":
                value, found = value[1:], found - 1
        body, is_string = value[:found], self._value_types == STRING
        if self.has_lines and (is_whole or is_string):
            body = body.removesuffix("\n")
        if is_whole:
            self._in_value, self._held = False, ""
            written = _escaped(body) + '"' if is_string else as_json(body, self._value_types)
        elif is_string:
            self._held, written = value[len(body) :], _escaped(body)
        else:
            self._held, written = value, ""
        if written:
            out.append(Piece(ARGUMENTS, written, self._index))
        return end


def key_as_json(key: str, is_first: bool) -> str:
    """Returns the part of a JSON object that precedes a value: the key as a JSON string and a colon, after a comma unless
    is_first."""
    return f"{'' if is_first else ', '}{json.dumps(key, ensure_ascii=False)}: "


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]
