"""Separates a reply's reasoning (`<think>…</think>`) from its answer while the text arrives."""

from __future__ import annotations

from daemon.text.tool_parsers.pieces import find_first_marker

OPEN, CLOSE = "<think>", "</think>"
_BEFORE, _OPENED, _INSIDE, _CLOSED, _ANSWER = range(5)


def reasoning_end(text: str, call_marker: str = "") -> int:
    """Returns the index after the last character of the reasoning in `text`, a reply that begins with reasoning: before </think>
    or, if that comes earlier, before call_marker; otherwise at the text's end. call_marker: a marker of tool calls that ends the
    reasoning, too; "" for none."""
    ends = [found for marker in (CLOSE, call_marker) if marker and (found := text.find(marker)) >= 0]
    return len(text[: min(ends, default=None)].rstrip())


class ReasoningSplitter:
    """Splits one reply. <think> is a marker only at the start of the reply. New lines next to the markers belong to neither part.

    opened: the prompt ended with <think>, so the reply begins inside the reasoning. call_marker: a marker of tool calls that ends
    the reasoning as </think> does, and is part of the answer; "" for none."""

    __slots__ = ("_held", "_markers", "_spaces", "_state")

    def __init__(self, opened: bool, call_marker: str = "") -> None:
        self._markers = (CLOSE, call_marker) if call_marker else (CLOSE,)  # the markers that end the reasoning
        self._state = _OPENED if opened else _BEFORE
        self._held = ""  # the end of the text so far, if it may be the start of a marker
        self._spaces: list[str] = []  # white space before the reply's first word, or where the reasoning may end

    @property
    def is_through(self) -> bool:
        """Returns whether all text from here on is the answer."""
        return self._state == _ANSWER

    def add(self, text: str) -> tuple[str, str]:
        """Takes the next text of the reply and returns the (reasoning, answer) that may be sent now."""
        if self._state == _ANSWER:
            return "", text
        text, self._held = self._held + text, ""
        reasoning = ""
        if self._state == _BEFORE:
            text = self._before(text)
        if self._state == _OPENED and (text := text.lstrip("\r\n")):
            self._state = _INSIDE
        if self._state == _INSIDE:
            reasoning, text = self._inside(text)
        if self._state == _CLOSED and (text := text.lstrip("\r\n")):
            self._state = _ANSWER
        return reasoning, text

    def end(self) -> tuple[str, str]:
        """Returns the (reasoning, answer) that was held back, at the end of the reply."""
        held, self._held = self._held, ""
        if self._state == _BEFORE:
            return "", "".join(self._spaces) + held
        return ("".join(self._spaces) + held if held else ""), ""

    def _before(self, text: str) -> str:
        """Looks for <think> at the start of the reply, and begins the reasoning if it is there. Returns the text after the marker
        or, without one, all text; "" while too little has come to tell."""
        body = text.lstrip()
        self._spaces.append(text[: len(text) - len(body)])
        if len(body) < len(OPEN) and OPEN.startswith(body):
            self._held = body
            return ""
        if body.startswith(OPEN):
            self._state, body = _OPENED, body[len(OPEN) :]
        else:
            self._state, body = _ANSWER, "".join(self._spaces) + body
        self._spaces.clear()
        return body

    def _inside(self, text: str) -> tuple[str, str]:
        found, whole, marker = find_first_marker(text, 0, self._markers)
        body = text[:found].rstrip()
        spaces = text[len(body) : found]
        reasoning = ""
        if body:
            reasoning = "".join(self._spaces) + body
            self._spaces.clear()
        self._spaces.append(spaces)
        if whole:
            self._state = _CLOSED
            self._spaces.clear()
            return reasoning, text[found + len(CLOSE) if marker == CLOSE else found :]
        self._held = text[found:]
        return reasoning, ""
