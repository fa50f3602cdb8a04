"""The format of gpt-oss, Harmony: a reply is a sequence of messages, each with a header that names its channel and its recipient.

`<|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>…<|return|>` is reasoning and an answer,
`<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{…}<|call|>` a call. Source: docs/format.md of openai/harmony.

Each of these special tokens reaches the parser as one Unicode noncharacter. So if a model spells out a token's name, because it was
asked about it, that text stays text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from daemon.text.tool_parsers.call import NAME, Call
from daemon.text.tool_parsers.json_value import JsonValue
from daemon.text.tool_parsers.pieces import ARGUMENTS, CALL_END, CONTENT, REASONING, Piece, skip_spaces

START, END, MESSAGE, CHANNEL, CONSTRAIN, RETURN, CALL = (chr(code) for code in range(0xFDD0, 0xFDD7))
# special token -> the character that stands for it
MARKS = {
    "<|start|>": START,
    "<|end|>": END,
    "<|message|>": MESSAGE,
    "<|channel|>": CHANNEL,
    "<|constrain|>": CONSTRAIN,
    "<|return|>": RETURN,
    "<|call|>": CALL,
}
ROLE = "assistant"
ANALYSIS, COMMENTARY, FINAL = "analysis", "commentary", "final"  # channels
FUNCTIONS = "functions."  # prefix of a function's name when it is a message's recipient
JSON = "json"  # the content type of a call's arguments
BETWEEN = "\n\n"  # between the texts of two messages that become one text

_MOST_HEADER = 256  # characters; longer text cannot be a header, so the model left the header out
_NO_MARK = rf"[^\s{START}-{CALL}]"
_SPLIT = re.compile(f"([{START}-{CALL}])")
_RECIPIENT = re.compile(rf"(?<!{_NO_MARK})to=({_NO_MARK}+)")
_CHANNEL = re.compile(rf"{CHANNEL}\s*([a-z]*)")
_MAY_NAME_RECIPIENT = re.compile(rf"\s*(?:t(?:o(?:={_NO_MARK}*\s*)?)?)?")
_ANALYSED = re.compile(rf"{CHANNEL}\s*{ANALYSIS}[^{MESSAGE}]*{MESSAGE}[^{START}-{CALL}]+")
# the parts of a header, each of which may be cut off at its end
_TO = rf"(?:\s*to={_NO_MARK}*|\s+to?\Z)?"
_AFTER_ROLE = re.compile(rf"{_TO}\s*")
_AFTER_CHANNEL = re.compile(rf"\s*[a-z]*{_TO}\s*(?:{CONSTRAIN}\s*[a-z]*|json\b|code\b)?\s*")


def speaks_harmony(template: str) -> bool:
    """Returns whether a chat template (its Jinja text) is in Harmony's format."""
    return "<|channel|>" in template and "<|message|>" in template


def marks_of(tokens: Mapping[int, str]) -> dict[int, str]:
    """Returns the token ids of Harmony's special tokens, each with the noncharacter that stands for it in texts; {} if the
    tokenizer does not have the tokens. tokens: the tokenizer's added tokens, id -> text."""
    marks = {token_id: MARKS[text] for token_id, text in tokens.items() if text in MARKS}
    return marks if {CHANNEL, MESSAGE} <= set(marks.values()) else {}


def reasoning_end(text: str) -> int:
    """Returns the index after the last character of the reasoning in `text`, a reply in Harmony's format; 0 if it has no
    reasoning."""
    return max((found.end() for found in _ANALYSED.finditer(text)), default=0)


class _Arguments(Call):
    """Reads the arguments of a call: the body of a Harmony message that is addressed to a function. The call is announced at once,
    because the header has named the function."""

    __slots__ = ("_begun", "_value")

    def __init__(self, index: int, lead: str, name: str, out: list[Piece]) -> None:
        super().__init__(index, lead)
        self._value = JsonValue()
        self._begun = False
        self._announce(name, out)

    def _read(self, text: str, at: int, out: list[Piece]) -> int:
        if not self._begun:
            at = skip_spaces(text, at)
            if at == len(text):
                return at
            self._begun = True
            if text[at] != "{":
                self.bad = True
                return at
        return self._last_arguments(self._value, text, at, out)

    def message_ended(self, out: list[Piece]) -> None:
        """Called when the message ends before the arguments are complete: an empty body becomes a call with `{}` as arguments, an
        incomplete one is given up as text."""
        if self._begun:
            self.give_up(out)
        else:
            out += [Piece(ARGUMENTS, "{}", self._index), Piece(CALL_END, "", self._index)]


class HarmonyParser:
    """Parses a reply's messages, as a ToolParser. Messages to functions are calls, messages on the analysis channel are reasoning,
    all others are content. A message to another recipient, such as browser.search, keeps its address as text: `to=browser.search
    …`."""

    def __init__(
        self,
        names: Sequence[str] = (),
        calls: bool = True,
        reasoning: bool = True,
        prompt: str = "",
        in_answer: bool = False,
    ) -> None:
        """Makes the parser of one reply. names: the offered tools, which count as functions even without the prefix `functions.`.
        calls: whether messages to functions are calls; otherwise they are text. reasoning: whether messages on the analysis channel
        are reasoning; otherwise they are content. prompt: the end of the prompt; if it begins a message, the reply continues that
        message. in_answer: whether the reply continues the text of a message that the client sent."""
        self._names, self._calls, self._reasoning = frozenset(names), calls, reasoning
        self._header: str | None = ""  # the header as far as it was read; None: outside of headers
        self._kind: int | None = None  # kind of the current message's text; None: outside of messages, or in a call
        self._lead = ""  # text to put before the message's text, unless that is empty
        self._said: set[int] = set()  # kinds of pieces so far
        self._call: _Arguments | None = None
        self._num_calls = 0
        self._begun: list[Piece] = []  # pieces of a message that the prompt has begun
        at = prompt.rfind(START)
        if at >= 0 and not in_answer:
            header, is_whole, body = prompt[at + 1 :].partition(MESSAGE)
            self._header = header.strip().removeprefix(ROLE)
            if is_whole and _SPLIT.search(body):
                self._header = None  # the prompt's message has ended, so the reply begins with a header
            elif is_whole:
                self._open(self._header, self._begun)
        elif in_answer:
            self._header, self._kind = None, CONTENT

    def add(self, text: str) -> list[Piece]:
        out, self._begun = self._begun, []
        for part in _SPLIT.split(text):
            if _SPLIT.match(part):
                self._mark(part, out)
            elif part:
                self._words(part, out)
        return out

    def end(self, cut: bool) -> list[Piece]:
        out, self._begun = self._begun, []
        if cut:
            self._call = None  # at max_tokens the call counts as it is
        self._close(out)
        return out

    # ---- structure

    def _mark(self, mark: str, out: list[Piece]) -> None:
        header = self._header
        if mark == MESSAGE:
            if header is not None:
                self._open(header, out)
            elif self._kind is None and self._call is None:
                self._begin(CONTENT)
        elif header is not None and mark in (CHANNEL, CONSTRAIN):
            self._header = header + mark
        elif mark != CONSTRAIN:
            self._close(out)
            if mark in (START, CHANNEL):  # a model may leave out the END before these
                self._header = mark

    def _open(self, header: str, out: list[Piece]) -> None:
        """Begins a message, whose header is complete: a call if it is addressed to a function, otherwise content or reasoning. Adds
        the pieces that follow from the header to `out`."""
        self._header = None
        found = _RECIPIENT.search(header)
        recipient = found[1] if found is not None and found[1] != ROLE else ""
        name = recipient.removeprefix(FUNCTIONS)
        is_function = recipient.startswith(FUNCTIONS) or recipient in self._names
        if self._calls and is_function and NAME.fullmatch(name):
            self._begin(CONTENT, f"to={recipient} ")
            self._kind = None
            self._call = _Arguments(self._num_calls, self._lead, name, out)
            self._num_calls += 1
        else:
            self._begin(self._kind_of(header), f"to={recipient} " if recipient else "")

    def _close(self, out: list[Piece]) -> None:
        """Ends the current message and adds the pieces that its end completes to `out`. If the message ends within its header, the
        header's role, channel, recipient and content type are removed, and the text that remains becomes a piece. That piece is
        reasoning if the channel is analysis and the parser was made with `reasoning`, otherwise content."""
        if self._header is not None:
            header, self._header = self._header, None
            self._begin(self._kind_of(header))
            self._say(_without_header(header), out)
        if self._call is not None:
            self._call.message_ended(out)
            self._call = None
            self._said.add(CONTENT)
        self._kind, self._lead = None, ""

    def _kind_of(self, header: str) -> int:
        found = _CHANNEL.search(header)
        return REASONING if self._reasoning and found is not None and found[1] == ANALYSIS else CONTENT

    # ---- text

    def _words(self, text: str, out: list[Piece]) -> None:
        if self._header is not None:
            text = self._in_header(text)
        if self._call is not None:
            text = self._in_call(self._call, text, out)
        if self._kind is None:
            text = text.lstrip()
            if text:
                self._begin(CONTENT)
        self._say(text, out)

    def _in_header(self, text: str) -> str:
        """Adds text to the header that is being read, and returns "" if all of it may belong to the header. Otherwise the model has
        left out the end of the header. Then a message begins, and the result is its text: all that was read, without the parts of a
        header."""
        assert self._header is not None
        room = _MOST_HEADER - len(self._header)
        header, rest = self._header + text[:room], text[room:]
        if not rest and (_SPLIT.search(header) or _MAY_NAME_RECIPIENT.fullmatch(header)):
            self._header = header
            return ""
        self._header = None
        self._begin(self._kind_of(header))
        return _without_header(header) + rest

    def _in_call(self, call: _Arguments, text: str, out: list[Piece]) -> str:
        """Passes text on to the call whose arguments are being read. Returns the text that does not belong to the arguments: what
        follows them, or what comes after the call turned out to be no call."""
        end = call.feed(text, 0, out)
        if call.bad:
            call.give_up(out)
            self._kind, self._lead = CONTENT, ""
            self._said.add(CONTENT)
        if call.bad or call.done:
            self._call = None
        return text[end:]

    def _begin(self, kind: int, address: str = "") -> None:
        self._kind = kind
        self._lead = (BETWEEN if kind in self._said else "") + address

    def _say(self, text: str, out: list[Piece]) -> None:
        if text and self._kind is not None:
            out.append(Piece(self._kind, self._lead + text))
            self._lead = ""
            self._said.add(self._kind)


def _without_header(header: str) -> str:
    """Returns `header` without the parts of a header (role, channel, recipient, type). Called for a header that no message follows;
    the result is text that the model should have put into a message."""
    if not _SPLIT.search(header):
        return _behind(_AFTER_ROLE, header) if header.lstrip().startswith("to=") else header
    role, mark, channel = header.removeprefix(START).partition(CHANNEL)
    role = role.lstrip()
    role = "" if ROLE.startswith(role) else _behind(_AFTER_ROLE, role.removeprefix(ROLE))
    if mark:
        role += _behind(_AFTER_CHANNEL, channel)
    return _SPLIT.sub("", role)


def _behind(words: re.Pattern[str], text: str) -> str:
    found = words.match(text)
    assert found is not None  # the pattern also matches the empty string
    return text[found.end() :]
