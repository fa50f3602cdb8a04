"""Splits a reply's reasoning (`<think>…</think>`) off its answer, as the text comes."""

from __future__ import annotations

from daemon.text.tool_parsers.pieces import find_marker

OPEN, CLOSE = "<think>", "</think>"
_BEFORE, _OPENED, _INSIDE, _CLOSED, _ANSWER = range(5)


class ReasoningSplitter:
    """Only at the start of a reply is <think> a marker. New lines next to the markers belong to neither part.

    `opened`: the prompt ended with <think>, so the reply begins inside."""

    __slots__ = ("_held", "_spaces", "_state")

    def __init__(self, opened: bool) -> None:
        self._state = _OPENED if opened else _BEFORE
        self._held = ""  # the part of a marker at the end of what was given
        self._spaces: list[str] = []  # before a reply's first word, or perhaps at the end of the reasoning

    @property
    def is_through(self) -> bool:
        """All that follows is the answer."""
        return self._state == _ANSWER

    def add(self, text: str) -> tuple[str, str]:
        """(reasoning, answer) that may be sent now."""
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
        """What was held back, once it is known that nothing follows."""
        held, self._held = self._held, ""
        if self._state == _BEFORE:
            return "", "".join(self._spaces) + held
        return ("".join(self._spaces) + held if held else ""), ""

    def _before(self, text: str) -> str:
        """What is to be read on."""
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
        found, whole = find_marker(text, 0, CLOSE)
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
            return reasoning, text[found + len(CLOSE) :]
        self._held = text[found:]
        return reasoning, ""
