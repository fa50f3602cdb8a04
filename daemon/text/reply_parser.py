"""Splits a reply's text into its reasoning, which comes first, then its content and tool calls."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from daemon.text.reasoning import ReasoningSplitter
from daemon.text.tool_parsers.pieces import ARGUMENTS, BROKEN, CALL, CALL_END, CONTENT, REASONING, Piece, ToolParser


class ReplyParser:
    """The parser of one reply's text, which it splits into pieces of reasoning, content and tool calls. It drops white space
    between calls, and between text and calls. tools: parses calls, and also reasoning if `reasoning` is None; None: no text is a
    call. reasoning: splits off the reasoning; None: all text goes to `tools`. one_call: whether calls after the first complete one
    are dropped."""

    __slots__ = ("_dropped", "_one_call", "_reasoning", "_spaces", "_tools", "num_calls")

    def __init__(self, tools: ToolParser | None, reasoning: ReasoningSplitter | None, one_call: bool = False) -> None:
        self._tools, self._reasoning, self._one_call = tools, reasoning, one_call
        # white space at the end of the text so far; it becomes content unless a call follows, or the reply ends after a call
        self._spaces: list[str] = []
        self._dropped = ""  # the white space before the latest call; it becomes content if that call is broken
        self.num_calls = 0  # complete calls

    @property
    def is_through(self) -> bool:
        """Returns whether all text that is still to come is content and needs no parsing."""
        return self._tools is None and (self._reasoning is None or self._reasoning.is_through)

    def add(self, text: str) -> list[Piece]:
        out: list[Piece] = []
        if self._reasoning is not None:
            reasoning, text = self._reasoning.add(text)
            if reasoning:
                out.append(Piece(REASONING, reasoning))
        if text:
            self._answer(text, out)
        return out

    def end(self, cut: bool) -> list[Piece]:
        """Returns the pieces that were still held back. Called at the end of the reply. cut: whether the reply ended at max_tokens;
        an unfinished call then does not count as malformed."""
        out: list[Piece] = []
        if self._reasoning is not None:
            reasoning, text = self._reasoning.end()
            if reasoning:
                out.append(Piece(REASONING, reasoning))
            if text:
                self._answer(text, out)
        if self._tools is not None:
            self._keep(self._tools.end(cut), out)
            if self._spaces and not self.num_calls:
                out.append(Piece(CONTENT, "".join(self._spaces)))
        return out

    def _answer(self, text: str, out: list[Piece]) -> None:
        if self._tools is None:
            out.append(Piece(CONTENT, text))
        else:
            self._keep(self._tools.add(text), out)

    def _keep(self, pieces: list[Piece], out: list[Piece]) -> None:
        for piece in pieces:
            kind = piece.kind
            if kind == CONTENT:
                body = piece.text.rstrip()
                if body:
                    out.append(Piece(CONTENT, "".join(self._spaces) + body))
                    self._spaces.clear()
                self._spaces.append(piece.text[len(body) :])
            elif kind == REASONING:
                out.append(piece)
            elif not (self._one_call and self.num_calls):
                if kind == CALL:
                    self._dropped = "".join(self._spaces)
                    self._spaces.clear()
                elif kind == BROKEN:
                    piece = piece._replace(text=self._dropped + piece.text)
                self.num_calls += kind == CALL_END
                out.append(piece)


@dataclass(slots=True)
class Reply:
    """A whole reply, split into its parts. calls: the (name, arguments as JSON) of each tool call."""

    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)  # (name, arguments)


def parse_whole(parser: ReplyParser, text: str, cut: bool) -> Reply:
    return assemble([*parser.add(text), *parser.end(cut)])


def assemble(pieces: Iterable[Piece]) -> Reply:
    """Joins all pieces of a reply into a Reply. A broken call becomes content, at its place in the text."""
    content: list[str] = []
    reasoning: list[str] = []
    calls: dict[int, tuple[str, list[str]]] = {}
    for piece in pieces:
        if piece.kind == CONTENT:
            content.append(piece.text)
        elif piece.kind == REASONING:
            reasoning.append(piece.text)
        elif piece.kind == CALL:
            calls[piece.call] = (piece.text, [])
        elif piece.kind == ARGUMENTS:
            calls[piece.call][1].append(piece.text)
        elif piece.kind == BROKEN:
            calls.pop(piece.call, None)
            content.append(piece.text)
    return Reply(
        content="".join(content),
        reasoning="".join(reasoning),
        calls=[(name, "".join(arguments)) for name, arguments in calls.values()],
    )
