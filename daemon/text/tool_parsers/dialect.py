"""The base class of the parsers for single dialects of tool calls: it reads content up to a marker, then a call, then what follows
the call."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from daemon.text.tool_parsers.call import Call
from daemon.text.tool_parsers.pieces import CONTENT, Piece, find_first_marker

# A mode reads from text[at] on and returns the index of the first unread character. It may set `held` and return len(text).
Mode = Callable[[str, int, list[Piece]], int]


class DialectParser(ABC):
    """Parses a reply in one dialect, as a ToolParser. Subclasses define `marker`, the text that opens a call; `opened`, which is
    called when the marker was read; and `after`, which reads the text that follows a complete call. lead: text that was read as the
    beginning of a call and is content if no call follows."""

    marker: str
    markers: tuple[str, ...] = ()  # all markers of a dialect with several; (): only `marker`

    def __init__(self) -> None:
        self.mode: Mode = self.content
        self.held = ""  # the end of the text so far that may become a marker
        self.lead = ""  # text that was read and is content only if no call follows
        self.num_calls = 0  # announced calls
        self._call: Call | None = None

    def add(self, text: str) -> list[Piece]:
        out: list[Piece] = []
        text, self.held = self.held + text, ""
        at = 0
        while at < len(text):
            at = self.mode(text, at, out)
        return out

    def end(self, cut: bool) -> list[Piece]:
        out: list[Piece] = []
        if self._call is not None:
            if not (cut and self._call.announced) and not self._call.finish(out):
                self._call.give_up(out)
        elif (rest := self.lead + self.held) and not (cut and self.mode == self.after):
            out.append(Piece(CONTENT, rest))
        self._call, self.lead, self.held = None, "", ""
        return out

    @abstractmethod
    def opened(self) -> None: ...

    @abstractmethod
    def after(self, text: str, at: int, out: list[Piece]) -> int: ...

    def content(self, text: str, at: int, out: list[Piece]) -> int:
        found, whole, marker = find_first_marker(text, at, self.markers or (self.marker,))
        if self.lead or found > at:
            out.append(Piece(CONTENT, self.lead + text[at:found]))
            self.lead = ""
        if not whole:
            self.held = text[found:]
            return len(text)
        return self.at_marker(marker, found)

    def at_marker(self, marker: str, at: int) -> int:
        """Begins to read the text after `marker`, which was found at index `at`. Returns the index from which reading continues."""
        self.lead = marker
        self.opened()
        return at + len(marker)

    def begin(self, call: Call) -> None:
        """Makes `call` read the text that follows. Also empties `lead`, the text that was read as the beginning of the call: the
        call has a copy of it, and returns that as text if it turns out to be no call."""
        self._call, self.lead, self.mode = call, "", self._in_call

    def no_call(self) -> None:
        """Ends the reading of a call, where a call was expected and none begins. The text in `lead`, which was read as the
        beginning of a call, and the text that follows it become content of the answer."""
        self.mode = self.content

    def closed(self, marker: str, text: str, at: int) -> int:
        """Reads `marker`, the closing tag of a call that has just ended, from text[at] on; content follows it. If the model left
        the tag out, the call still counts. Returns the index of the first unread character."""
        at = self.skip_spaces(text, at)
        rest = text[at : at + len(marker)]
        if rest and not marker.startswith(rest):
            self.no_call()
        elif rest == marker:
            self.lead, self.mode = "", self.content
            return at + len(marker)
        else:
            self.held = rest
            return len(text)
        return at

    def skip_spaces(self, text: str, at: int) -> int:
        start = at
        while at < len(text) and text[at] in " \t\r\n":
            at += 1
        self.lead += text[start:at]
        return at

    def _in_call(self, text: str, at: int, out: list[Piece]) -> int:
        call = self._call
        assert call is not None
        at = call.feed(text, at, out)
        if call.bad or call.done:
            self._call = None
            self.num_calls += call.announced
            self.mode = self.after if call.done else self.content
            if call.bad:
                call.give_up(out)
                self.gave_up()
        return at

    def gave_up(self) -> None:  # noqa: B027 (most dialects have nothing to do then)
        """Called when a call was malformed, for subclasses that have to reset their state; does nothing here."""
