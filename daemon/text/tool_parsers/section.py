"""The base class of parsers for dialects that write all calls in one section, each call between tags of its own."""

from __future__ import annotations

from abc import abstractmethod

from daemon.text.tool_parsers.call import Call
from daemon.text.tool_parsers.dialect import DialectParser
from daemon.text.tool_parsers.pieces import Piece


class SectionParser(DialectParser):
    """Parses replies with sections of calls. Subclasses define `marker`, which opens a section; `close`, which ends it;
    `begin_call` and `end_call`, the tags before a call and after its arguments; and `new_call`. Closing tags may be missing."""

    close: str
    begin_call: str
    end_call: tuple[str, ...]

    @abstractmethod
    def new_call(self, index: int, lead: str) -> Call:
        """Returns the object that reads a call, from the end of `begin_call` to the end of the arguments. index: the call's number
        in the reply, from 0. lead: the text of the tags before the arguments, which was read already."""

    def opened(self) -> None:
        self.mode = self._opened

    def _opened(self, text: str, at: int, out: list[Piece]) -> int:
        return self._tag(text, at, (self.begin_call,))

    def after(self, text: str, at: int, out: list[Piece]) -> int:
        """Reads, from text[at] on, a tag that ends a call, ends the section or begins the next call. Returns the index of the first
        unread character."""
        return self._tag(text, at, (*self.end_call, self.begin_call, self.close))

    def _tag(self, text: str, at: int, tags: tuple[str, ...]) -> int:
        at = self.skip_spaces(text, at)
        rest = text[at:]
        for tag in tags:
            if rest.startswith(tag):
                if tag == self.begin_call:
                    self.begin(self.new_call(self.num_calls, self.lead + tag))
                else:
                    self.lead = ""
                    if tag == self.close:
                        self.mode = self.content
                return at + len(tag)
        if rest and any(tag.startswith(rest) for tag in tags):
            self.held = rest
            return len(text)
        if rest:
            self.no_call()
        return at
