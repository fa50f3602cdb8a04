"""The dialect of Gemma 4: `<|tool_call>call:NAME{KEY:VALUE, …}<tool_call|>`, any number of calls. Strings stand between `<|"|>`."""

from __future__ import annotations

from daemon.text.tool_parsers.call import NAME, Call
from daemon.text.tool_parsers.dialect import DialectParser
from daemon.text.tool_parsers.gemma_value import GemmaValue
from daemon.text.tool_parsers.pieces import ARGUMENTS, CALL_END, Piece

OPEN, CLOSE = "<|tool_call>", "<tool_call|>"
PREFIX = "call:"
_MOST_NAME = 128  # characters


class _GemmaCall(Call):
    """Reads a call of Gemma 4's dialect, from `call:` to the brace that ends the arguments."""

    __slots__ = ("_head", "_value")

    def __init__(self, index: int, lead: str) -> None:
        super().__init__(index, lead)
        self._head = ""  # the text before the arguments
        self._value = GemmaValue()

    def _read(self, text: str, at: int, out: list[Piece]) -> int:
        while at < len(text) and not (self.announced or self.bad):
            at = self._name(text[at], at, out)
        if self.bad or not self.announced:
            return at
        written: list[str] = []
        end = self._value.feed(text, at, written)
        if written:
            out.append(Piece(ARGUMENTS, "".join(written), self._index))
        self.bad, self.done = self._value.bad, self._value.done
        if self.done:
            out.append(Piece(CALL_END, "", self._index))
        return end

    def _name(self, char: str, at: int, out: list[Piece]) -> int:
        """Reads a character of `call:` or of the function's name. At the brace that opens the arguments, only announces the call;
        the brace itself is read with the arguments. Returns the index of the first unread character."""
        if char == "{":
            name = self._head.removeprefix(PREFIX).strip()
            self.bad = not self._head.startswith(PREFIX) or not NAME.fullmatch(name)
            if not self.bad:
                self._announce(name, out)
            return at
        self._head = (self._head + char).lstrip()
        is_prefix = PREFIX.startswith(self._head) or self._head.startswith(PREFIX)
        self.bad = not is_prefix or len(self._head) > len(PREFIX) + _MOST_NAME
        return at if self.bad else at + 1


class Gemma4Parser(DialectParser):
    marker = OPEN

    def opened(self) -> None:
        self.begin(_GemmaCall(self.num_calls, self.lead))

    def after(self, text: str, at: int, out: list[Piece]) -> int:
        return self.closed(CLOSE, text, at)
