"""The dialect of Llama 3: `{"name": …, "parameters": {…}}` as the whole reply or after <|python_tag|>; more calls after `;` or a
new line.
"""

from __future__ import annotations

from collections.abc import Sequence

from daemon.text.tool_parsers.call import CallObject
from daemon.text.tool_parsers.dialect import DialectParser
from daemon.text.tool_parsers.pieces import Piece

PYTHON_TAG = "<|python_tag|>"


class Llama3Parser(DialectParser):
    """Parses replies in Llama 3's dialect. names: the offered tools. A call of another function counts only after <|python_tag|>,
    because a reply without that tag may be JSON that is an answer."""

    marker = PYTHON_TAG

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__()
        self._names = frozenset(names)
        self._tagged = False
        self.mode = self._start

    def opened(self) -> None:
        self._tagged, self.mode = True, self._start

    def _start(self, text: str, at: int, out: list[Piece]) -> int:
        at = self.skip_spaces(text, at)
        if at < len(text):
            if text[at] == "{":
                self.begin(CallObject(self.num_calls, self.lead, None if self._tagged else self._names))
            else:
                self.no_call()
        return at

    def after(self, text: str, at: int, out: list[Piece]) -> int:
        start = at
        while at < len(text) and text[at] in " \t\r\n;":
            at += 1
        self.lead += text[start:at]
        if at < len(text):
            self.mode = self._start if text[at] == "{" else self.content
        return at
