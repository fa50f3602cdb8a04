"""The dialect of Qwen3-Coder: `<tool_call><function=NAME><parameter=KEY>VALUE</parameter>…</function></tool_call>`, any number of
calls, with text between them. A line break on either side of a value is no part of it. Seed-OSS writes the same with
`<seed:tool_call>` in place of `<tool_call>`.

Values are plain text; the tool's schema says what they are in JSON.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from daemon.text.tool_parsers.call import NAME
from daemon.text.tool_parsers.dialect import DialectParser
from daemon.text.tool_parsers.hermes import CLOSE, OPEN
from daemon.text.tool_parsers.parameter_types import ParameterTypes
from daemon.text.tool_parsers.pieces import Piece
from daemon.text.tool_parsers.text_call import MOST_KEY, TextCall, types_by_tool

SEED_OPEN, SEED_CLOSE = "<seed:tool_call>", "</seed:tool_call>"
FUNCTION, END_FUNCTION = "<function=", "</function>"
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"

_TAG, _NAME, _KEY = range(3)  # what is expected next outside of values


class _FunctionCall(TextCall):
    """Reads a call of Qwen3-Coder's dialect, from `<function=` to `</function>`. tools: the parameter types of the offered tools.
    names: the function names that count as calls; None: any name, because `<tool_call>` came before."""

    end_value = END_PARAMETER
    has_lines = True

    __slots__ = ("_names", "_state")

    def __init__(self, index: int, lead: str, tools: Mapping[str, ParameterTypes], names: frozenset[str] | None) -> None:
        super().__init__(index, lead, tools)
        self._names = names
        self._state = _TAG
        self._tags = (FUNCTION,)

    def _step(self, char: str, at: int, out: list[Piece]) -> int:
        return self._tag(char, at, out) if self._state == _TAG else self._name(char, at, out)

    def _take(self, tag: str, out: list[Piece]) -> None:
        if tag == END_FUNCTION:
            self._end_arguments(out)
        else:
            self._state = _NAME if tag == FUNCTION else _KEY

    def _name(self, char: str, at: int, out: list[Piece]) -> int:
        """Reads a character of the name of the function or of a parameter, which the bracket `>` ends. Returns the index of the
        first unread character."""
        if char != ">":
            self._word += char
            self.bad = char == "\n" or len(self._word) > MOST_KEY
            return at if self.bad else at + 1
        word, self._word = self._word, ""
        is_function = self._state == _NAME
        self.bad = not (NAME.fullmatch(word) if is_function else word)
        self.bad |= is_function and self._names is not None and word not in self._names
        if self.bad:
            return at
        self._state, self._tags = _TAG, (PARAMETER, END_FUNCTION)
        if is_function:
            self._begin_arguments(word, out)
        else:
            self._begin_value(word, out)
        return at + 1


class Qwen3CoderParser(DialectParser):
    """Parses replies in Qwen3-Coder's dialect. names: the offered tools. Without `<tool_call>`, which these models sometimes leave
    out, only calls of these tools count. schemas: the schema of each tool's parameters, as JSON, in the order of `names`. tags: the
    tags before and after a call."""

    def __init__(self, names: Sequence[str], schemas: Sequence[bytes], tags: tuple[str, str] = (OPEN, CLOSE)) -> None:
        super().__init__()
        self.marker, self._close = tags
        self.markers = (self.marker, FUNCTION)
        self._names = frozenset(names)
        self._types = types_by_tool(names, schemas)

    def at_marker(self, marker: str, at: int) -> int:
        if marker == FUNCTION:
            self.begin(_FunctionCall(self.num_calls, "", self._types, self._names))
            return at
        return super().at_marker(marker, at)

    def opened(self) -> None:
        self.begin(_FunctionCall(self.num_calls, self.lead, self._types, None))

    def after(self, text: str, at: int, out: list[Piece]) -> int:
        return self.closed(self._close, text, at)
