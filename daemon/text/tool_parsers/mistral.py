"""The dialect of Mistral: `[TOOL_CALLS] [{"name": …, "arguments": {…}}, …]`, or the newer `[TOOL_CALLS]name[ARGS]{…}` once for each
call.
"""

from __future__ import annotations

from daemon.text.tool_parsers.call import CallObject
from daemon.text.tool_parsers.dialect import DialectParser
from daemon.text.tool_parsers.named_call import NamedCall
from daemon.text.tool_parsers.pieces import Piece

MARKER = "[TOOL_CALLS]"


class MistralParser(DialectParser):
    marker = MARKER

    def __init__(self) -> None:
        super().__init__()
        self._in_list = False

    def opened(self) -> None:
        self.mode = self._opened

    def gave_up(self) -> None:
        self._in_list = False

    def _opened(self, text: str, at: int, out: list[Piece]) -> int:
        at = self.skip_spaces(text, at)
        if at == len(text):
            return at
        if text[at] == "[":
            self.lead += "["
            self._in_list, self.mode = True, self._item
            return at + 1
        self.begin((CallObject if text[at] == "{" else NamedCall)(self.num_calls, self.lead))
        return at

    def _item(self, text: str, at: int, out: list[Piece]) -> int:
        at = self.skip_spaces(text, at)
        if at < len(text):
            if text[at] == "{":
                self.begin(CallObject(self.num_calls, self.lead))
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
            return at + 1
        return at
