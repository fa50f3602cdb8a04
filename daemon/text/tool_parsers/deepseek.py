"""The dialect of DeepSeek: `<｜tool▁calls▁begin｜>`, the calls, `<｜tool▁calls▁end｜>`. In V3.1 a call is
`<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{…}<｜tool▁call▁end｜>`. V3 and R1 write `function<｜tool▁sep｜>NAME`, and on the next lines
the arguments, fenced as JSON.
"""

from __future__ import annotations

from daemon.text.tool_parsers.call import NAME, Call
from daemon.text.tool_parsers.json_value import JsonValue
from daemon.text.tool_parsers.pieces import Piece
from daemon.text.tool_parsers.section import SectionParser

OPEN, CLOSE = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
BEGIN, SEPARATOR, END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
KIND = "function"  # what V3 writes before the separator
FENCE, JSON_FENCE = "```", "```json"
_MOST_NAME = 256  # characters, with the separator


def is_fenced(template: str) -> bool:
    """Returns whether a chat template (its Jinja text) writes calls as V3 and R1 do, with fenced arguments."""
    return JSON_FENCE in template


_FIRST, _SECOND, _FENCE, _ARGUMENTS = range(4)  # what is expected next: text before, or after, the separator; a fence; arguments


class _NamedCall(Call):
    """Reads a call of DeepSeek's dialect, in the form of V3.1 or of V3, from the function's name to the end of the arguments."""

    __slots__ = ("_expected", "_first", "_value", "_word")

    def __init__(self, index: int, lead: str) -> None:
        super().__init__(index, lead)
        self._expected = _FIRST
        self._first = ""  # what stands before the separator
        self._word = ""  # characters of the current part so far
        self._value = JsonValue()

    def _read(self, text: str, at: int, out: list[Piece]) -> int:
        while at < len(text) and not (self.done or self.bad):
            if self._expected == _ARGUMENTS:
                at = self._last_arguments(self._value, text, at, out)
            else:
                self._step(text[at], out)
                at += not self.bad and self._expected != _ARGUMENTS
        return at

    def _step(self, char: str, out: list[Piece]) -> None:
        """Reads the next character before the arguments: of the name, the separator or the fence. At the brace that opens the
        arguments, only changes the state; the brace itself is read with the arguments."""
        if self._expected == _FIRST:
            self._word += char
            self.bad = len(self._word) > _MOST_NAME
            if self._word.endswith(SEPARATOR):
                self._first, self._word = self._word.removesuffix(SEPARATOR).strip(), ""
                self._expected = _SECOND
        elif self._expected == _SECOND:
            if char == "{" and not self._word:
                self._named(self._first, out)
                self._expected = _ARGUMENTS
            elif char == "\n" and self._word:
                self._named(self._word.strip(), out)
                self._word, self._expected = "", _FENCE
            elif self._word or char not in " \t\r\n":
                self._word += char
                self.bad = self._first != KIND or len(self._word) > _MOST_NAME
        elif char == "{" and self._word in ("", JSON_FENCE):
            self._expected = _ARGUMENTS
        elif char not in " \t\r\n" or self._word not in ("", JSON_FENCE):
            self._word += char
            self.bad = not JSON_FENCE.startswith(self._word)

    def _named(self, name: str, out: list[Piece]) -> None:
        self.bad = not NAME.fullmatch(name)
        if not self.bad:
            self._announce(name, out)


class DeepSeekParser(SectionParser):
    marker, close = OPEN, CLOSE
    begin_call, end_call = BEGIN, (FENCE, END)

    def new_call(self, index: int, lead: str) -> Call:
        return _NamedCall(index, lead)
