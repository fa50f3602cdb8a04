"""Our own dialect, for forced calls of models whose template tells of none: `{"name":…,"arguments":{…}}`, one call a line."""

from __future__ import annotations

import json
from collections.abc import Sequence

from daemon.text.tool_parsers.call import CallObject
from daemon.text.tool_parsers.dialect import DialectParser
from daemon.text.tool_parsers.pieces import CONTENT, Piece

BETWEEN = "\n"  # calls
AFTER_ARGUMENTS = "}"


def before_arguments(name: str) -> str:
    """A call up to its arguments; AFTER_ARGUMENTS ends it."""
    return f'{{"name":{json.dumps(name)},"arguments":'


def written(name: str, arguments: str) -> str:
    """A whole call. `arguments`: JSON."""
    return before_arguments(name) + arguments + AFTER_ARGUMENTS


class GenericParser(DialectParser):
    """`names`: the tools offered; only their calls are calls. What is none, and all that follows, is content."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__()
        self._names = frozenset(names)
        self.mode = self._start

    def opened(self) -> None:
        """There is no marker to read."""

    def content(self, text: str, at: int, out: list[Piece]) -> int:
        out.append(Piece(CONTENT, self.lead + text[at:]))
        self.lead = ""
        return len(text)

    def _start(self, text: str, at: int, out: list[Piece]) -> int:
        at = self.skip_spaces(text, at)
        if at < len(text):
            if text[at] == "{":
                self.begin(CallObject(self.num_calls, self.lead, self._names))
            else:
                self.no_call()
        return at

    def after(self, text: str, at: int, out: list[Piece]) -> int:
        return self._start(text, at, out)
