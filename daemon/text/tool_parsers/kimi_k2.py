"""The dialect of Kimi K2: `<|tool_calls_section_begin|>`, the calls, `<|tool_calls_section_end|>`. A call is
`<|tool_call_begin|>functions.NAME:INDEX<|tool_call_argument_begin|>{…}<|tool_call_end|>`; the text between the first two tags is
the call's id.
"""

from __future__ import annotations

from daemon.text.tool_parsers.call import NAME, Call
from daemon.text.tool_parsers.call_numbers import PREFIX
from daemon.text.tool_parsers.json_value import JsonValue
from daemon.text.tool_parsers.pieces import Piece
from daemon.text.tool_parsers.section import SectionParser

OPEN, CLOSE = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
BEGIN, ARGUMENTS, END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
_MOST_ID = 256  # characters, with the tag after it

_IN_ID, _BEFORE_ARGUMENTS, _IN_ARGUMENTS = range(3)


class _IdCall(Call):
    """Reads a call of Kimi K2's dialect from the call's id, which names the function, to the end of the arguments."""

    __slots__ = ("_id", "_state", "_value")

    def __init__(self, index: int, lead: str) -> None:
        super().__init__(index, lead)
        self._state = _IN_ID
        self._id = ""
        self._value = JsonValue()

    def _read(self, text: str, at: int, out: list[Piece]) -> int:
        while at < len(text) and not (self.done or self.bad):
            if self._state == _IN_ARGUMENTS:
                at = self._last_arguments(self._value, text, at, out)
            else:
                self._step(text[at], out)
                at += not self.bad and self._state != _IN_ARGUMENTS
        return at

    def _step(self, char: str, out: list[Piece]) -> None:
        """Reads the next character before the arguments: of the call's id or of the tag after it. At the brace that opens the
        arguments, only announces the call; the brace itself is read with the arguments."""
        if self._state == _IN_ID:
            self._id += char
            if self._id.endswith(ARGUMENTS):
                self._id = self._id.removesuffix(ARGUMENTS).strip()
                self._state = _BEFORE_ARGUMENTS
            self.bad = len(self._id) > _MOST_ID
        elif char == "{" and (name := _name_in(self._id)):
            self._announce(name, out, self._id)
            self._state = _IN_ARGUMENTS
        else:
            self.bad = char not in " \t\r\n"


def _name_in(call_id: str) -> str:
    """Returns the function's name in a call's id (`functions.NAME:INDEX`); "" if the text is no id. Models sometimes leave out
    either the prefix or the number; a text without both is no id."""
    name, colon, number = call_id.removeprefix(PREFIX).partition(":")
    has_number = number.isascii() and number.isdigit()
    is_id = bool(NAME.fullmatch(name)) and (has_number if colon else call_id.startswith(PREFIX))
    return name if is_id else ""


class KimiK2Parser(SectionParser):
    marker, close = OPEN, CLOSE
    begin_call, end_call = BEGIN, (END,)

    def new_call(self, index: int, lead: str) -> Call:
        return _IdCall(index, lead)
