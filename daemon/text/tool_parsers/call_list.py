"""The base class of parsers for dialects whose calls are JSON objects in a list: MARKER `[{"name": …, "arguments": {…}}, …]`."""

from __future__ import annotations

from daemon.text.tool_parsers.call import Call, CallObject
from daemon.text.tool_parsers.dialect import DialectParser
from daemon.text.tool_parsers.pieces import Piece


class ListParser(DialectParser):
    """Parses replies with a list of calls, or a single call without the list's brackets, after `marker`, which subclasses define.
    close: the tag after the list, "" for none. name_key: the key of a function's name."""

    close = ""
    name_key = "name"

    def __init__(self) -> None:
        super().__init__()
        self._in_list = False

    def opened(self) -> None:
        self.mode = self._opened

    def gave_up(self) -> None:
        self._in_list = False

    def other_call(self) -> Call | None:
        """Returns the object that reads a call which begins with neither a bracket nor a brace; None if the dialect has no such
        calls. Called when such text follows the marker."""
        return None

    def _opened(self, text: str, at: int, out: list[Piece]) -> int:
        at = self.skip_spaces(text, at)
        if at == len(text):
            return at
        if text[at] == "[":
            self.lead += "["
            self._in_list, self.mode = True, self._item
            return at + 1
        call = self._object() if text[at] == "{" else self.other_call()
        if call is None:
            self.no_call()
        else:
            self.begin(call)
        return at

    def _object(self) -> Call:
        return CallObject(self.num_calls, self.lead, name_key=self.name_key)

    def _item(self, text: str, at: int, out: list[Piece]) -> int:
        at = self.skip_spaces(text, at)
        if at < len(text):
            if text[at] == "{":
                self.begin(self._object())
            else:
                self._in_list = False
                self.no_call()
        return at

    def after(self, text: str, at: int, out: list[Piece]) -> int:
        if not self._in_list:
            self.mode = self.content
            return at
        at = self.skip_spaces(text, at)
        if at == len(text):
            return at
        if text[at] == ",":
            self.lead += ","
            self.mode = self._item
            return at + 1
        self._in_list, self.mode = False, self.content
        if text[at] == "]":
            self.lead = ""
            if self.close:
                self.mode = self._behind
            return at + 1
        return at

    def _behind(self, text: str, at: int, out: list[Piece]) -> int:
        return self.closed(self.close, text, at)
