"""The dialect of Hermes and Qwen: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, any number of calls, with text between
them.
"""

from __future__ import annotations

from daemon.text.tool_parsers.call import CallObject
from daemon.text.tool_parsers.dialect import DialectParser
from daemon.text.tool_parsers.pieces import Piece

OPEN, CLOSE = "<tool_call>", "</tool_call>"
OTHER_TAGS = ("<tool_calls>", "<invoke")  # tags of other dialects, which have no parser here; their templates contain OPEN as well


class HermesParser(DialectParser):
    marker = OPEN

    def opened(self) -> None:
        self.begin(CallObject(self.num_calls, self.lead))

    def after(self, text: str, at: int, out: list[Piece]) -> int:
        return self.closed(CLOSE, text, at)
