"""The dialect that hearthd defines itself, for forced calls of models whose template shows none: `{"name":…,"arguments":{…}}`, one
call per line."""

from __future__ import annotations

import json
from collections.abc import Sequence

from daemon.text.tool_parsers.call import CallObject
from daemon.text.tool_parsers.dialect import DialectParser
from daemon.text.tool_parsers.pieces import CONTENT, Piece

BETWEEN = "\n"  # between two calls
AFTER_ARGUMENTS = "}"


def before_arguments(name: str) -> str:
    """Returns the beginning of a call of the function `name` in the generic dialect, up to its arguments. AFTER_ARGUMENTS is the
    text that ends the call."""
    return f'{{"name":{json.dumps(name)},"arguments":'


def written(name: str, arguments: str) -> str:
    """Returns a whole call in the generic dialect: `{"name":…,"arguments":{…}}`. arguments: the arguments as JSON."""
    return before_arguments(name) + arguments + AFTER_ARGUMENTS


class GenericParser(DialectParser):
    """Parses replies in the generic dialect: calls as JSON objects, one per line, from the reply's beginning. names: the offered
    tools; only their calls count as calls. From the first text on that is not such a call, all text is content."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__()
        self._names = frozenset(names)
        self.mode = self._start

    def opened(self) -> None:
        """Does nothing, since this dialect has no marker."""

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
