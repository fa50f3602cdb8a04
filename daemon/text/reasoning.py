"""Separates a reply's reasoning, which stands between two markers (`<think>…</think>`), from its answer while the text arrives."""

from __future__ import annotations

from typing import NamedTuple

from daemon.text.tool_parsers.harmony import speaks_harmony
from daemon.text.tool_parsers.pieces import find_first_marker
from daemon.text.tool_parsers.registry import HARMONY, NONE


class Markers(NamedTuple):
    """The texts that a model writes around its reasoning. tag, label: together the opening marker; `tag` may be a special token,
    `label` is plain text. close: the closing marker. answer: texts that the model writes around its answer, which are removed from
    it; those that are special tokens do not arrive here."""

    tag: str
    close: str
    label: str = ""
    answer: tuple[str, ...] = ()

    @property
    def open(self) -> str:
        return self.tag + self.label


THINK, COMMAND, GEMMA4, MISTRAL, SEED_OSS = "think", "command", "gemma4", "mistral", "seed_oss"
# name of a dialect of reasoning -> its markers
MARKERS = {
    THINK: Markers("<think>", "</think>"),
    COMMAND: Markers(
        "<|START_THINKING|>",
        "<|END_THINKING|>",
        answer=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
    ),
    GEMMA4: Markers("<|channel>", "<channel|>", label="thought\n"),
    MISTRAL: Markers("[THINK]", "[/THINK]"),
    SEED_OSS: Markers("<seed:think>", "</seed:think>"),
}
# texts that are shown to the splitter even if they are special tokens
TAGS = frozenset(text for markers in MARKERS.values() for text in (markers.tag, markers.close))
_BEFORE, _OPENED, _INSIDE, _CLOSED, _ANSWER = range(5)


def detect_reasoning(template: str) -> str:
    """Returns the name of the dialect in which a model writes its reasoning, as its chat template (Jinja text) shows it; NONE for
    no known one."""
    if speaks_harmony(template):
        return HARMONY
    return next((name for name, markers in MARKERS.items() if markers.tag in template or markers.close in template), NONE)


def reasoning_end(text: str, close: str, call_marker: str = "") -> int:
    """Returns the index after the last character of the reasoning in `text`, a reply that begins with reasoning. The reasoning ends
    before the marker `close` or before `call_marker`, whichever comes first; without either, at the end of the text. call_marker: a
    marker of tool calls; "" for none."""
    ends = [found for marker in (close, call_marker) if marker and (found := text.find(marker)) >= 0]
    return len(text[: min(ends, default=None)].rstrip())


class ReasoningSplitter:
    """Splits one reply, which arrives in pieces, into reasoning and answer. The opening marker counts only at the start of the
    reply. Line breaks after a marker and white space before the closing marker belong to neither part.

    opened: whether the prompt ended with the opening marker, so that the reply begins inside the reasoning. markers: what the model
    writes around its reasoning. call_marker: a marker of tool calls that ends the reasoning, too, and is part of the answer; "" for
    none."""

    __slots__ = ("_around", "_close", "_held", "_held_answer", "_markers", "_open", "_spaces", "_state")

    def __init__(self, opened: bool, markers: Markers = MARKERS[THINK], call_marker: str = "") -> None:
        self._open, self._close, self._around = markers.open, markers.close, markers.answer
        self._held_answer = ""  # the last characters of the answer, held back while they may begin one of `_around`
        self._markers = (self._close, call_marker) if call_marker else (self._close,)  # the markers that end the reasoning
        self._state = _OPENED if opened else _BEFORE
        self._held = ""  # the end of the text so far, if it may be the start of a marker
        self._spaces: list[str] = []  # white space before the reply's first word, or where the reasoning may end

    @property
    def is_through(self) -> bool:
        """Returns whether all text that is still to come is the answer, so that `add` need not be called for it."""
        return self._state == _ANSWER and not self._around

    def add(self, text: str) -> tuple[str, str]:
        """Takes the next text of the reply and returns the (reasoning, answer) that may be sent now."""
        reasoning, answer = self._split(text)
        return reasoning, self._bare(answer) if self._around else answer

    def _split(self, text: str) -> tuple[str, str]:
        """Takes the next text of the reply and returns the (reasoning, answer) that may be sent now. Unlike `add`, it leaves the
        texts that the model writes around its answer (markers.answer) in the answer."""
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
        """Returns the (reasoning, answer) that was still held back. Called at the end of the reply."""
        held, self._held = self._held, ""
        if self._state == _BEFORE:
            return "", "".join(self._spaces) + held
        if self._state == _ANSWER:
            return "", self._held_answer
        return ("".join(self._spaces) + held if held else ""), ""

    def _bare(self, answer: str) -> str:
        """Returns the answer's next text without the texts of markers.answer."""
        answer, self._held_answer = self._held_answer + answer, ""
        parts, at = [], 0
        while at < len(answer):
            found, is_whole, marker = find_first_marker(answer, at, self._around)
            parts.append(answer[at:found])
            if not is_whole:
                self._held_answer = answer[found:]
                break
            at = found + len(marker)
        return "".join(parts)

    def _before(self, text: str) -> str:
        """Looks for the opening marker at the start of the reply, and begins the reasoning if it is there. Returns the text after
        the marker or, without one, all text; "" while too little has come to tell."""
        body = text.lstrip()
        self._spaces.append(text[: len(text) - len(body)])
        if len(body) < len(self._open) and self._open.startswith(body):
            self._held = body
            return ""
        if body.startswith(self._open):
            self._state, body = _OPENED, body[len(self._open) :]
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
            return reasoning, text[found + len(marker) if marker == self._close else found :]
        self._held = text[found:]
        return reasoning, ""
