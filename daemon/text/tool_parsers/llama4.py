"""The dialect of Llama 4, and of other Llama models whose template asks for it. There are two forms of calls: the reply is a list
of calls in Python's syntax, `[NAME(KEY=VALUE, …), …]`, or it has `{"name": …, "parameters": {…}}` for each call, as the template of
Llama 4's checkpoints asks.

Calls in either form may stand between <|python_start|> and <|python_end|>. The template of Llama 4's checkpoints puts the text of a
turn between these tags, and its calls after them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from daemon.text.tool_parsers.bracket_value import SPACES
from daemon.text.tool_parsers.call import NAME, Call, CallObject
from daemon.text.tool_parsers.dialect import DialectParser
from daemon.text.tool_parsers.pieces import ARGUMENTS, CALL_END, Piece
from daemon.text.tool_parsers.python_value import PythonValue
from daemon.text.tool_parsers.text_call import MOST_KEY, key_as_json

START, END = "<|python_start|>", "<|python_end|>"
_HEADER = "<|header_start|>"  # only in templates of Llama 4
_LIST = re.compile(r"\[func(?:_name)?1?\(")  # how templates describe the list of calls
_NAME_RUN = re.compile(r"[a-zA-Z0-9_.-]*")
KEY = r"""[^\x00-\x20=,:;()\[\]{}"'\\]"""  # a character of an argument's name
_KEY_RUN = re.compile(f"{KEY}*")
_MOST_NAME = 128  # characters

_IN_NAME, _KEY_OR_END, _IN_KEY, _EQUALS, _IN_VALUE, _COMMA_OR_END = range(6)


def asks_for_lists(template: str) -> bool:
    return _LIST.search(template) is not None


def is_llama4(template: str) -> bool:
    return _HEADER in template


class PythonCall(Call):
    """Reads a call in Python's syntax, `NAME(KEY=VALUE, …)`, and passes its arguments on as JSON. names: the function names that
    count as calls; None: any name."""

    __slots__ = ("_expected", "_is_first", "_name", "_names", "_value", "_word")

    def __init__(self, index: int, lead: str, names: frozenset[str] | None) -> None:
        super().__init__(index, lead)
        self._names = names
        self._expected = _IN_NAME
        self._name = self._word = ""  # the characters read so far
        self._is_first = True  # whether no argument was read yet
        self._value = PythonValue()

    def _read(self, text: str, at: int, out: list[Piece]) -> int:
        while at < len(text) and not (self.done or self.bad):
            if self._expected == _IN_VALUE:
                at = self._argument(text, at, out)
            elif self._expected == _IN_NAME:
                at = self._function(text, at)
            elif self._expected == _IN_KEY:
                at = self._key(text, at)
            elif text[at] in SPACES:
                at += 1
            else:
                at = self._structure(text[at], at, out)
        return at

    def _function(self, text: str, at: int) -> int:
        match = _NAME_RUN.match(text, at)
        assert match is not None
        self._name += match[0]
        at = match.end()
        self.bad = len(self._name) > _MOST_NAME
        if self.bad or at == len(text):
            return at
        is_known = self._names is None or self._name in self._names
        self.bad = text[at] != "(" or not NAME.fullmatch(self._name) or not is_known
        self._expected = _KEY_OR_END
        return at if self.bad else at + 1

    def _key(self, text: str, at: int) -> int:
        match = _KEY_RUN.match(text, at)
        assert match is not None
        self._word += match[0]
        self.bad = len(self._word) > MOST_KEY
        if match.end() < len(text):
            self.bad |= not self._word
            self._expected = _EQUALS
        return match.end()

    def _structure(self, char: str, at: int, out: list[Piece]) -> int:
        expected = self._expected
        if char == ")" and expected in (_KEY_OR_END, _COMMA_OR_END):
            self._begin(out)
            out += [Piece(ARGUMENTS, "}", self._index), Piece(CALL_END, "", self._index)]
            self.done = True
        elif expected == _KEY_OR_END:
            self._expected = _IN_KEY
            return at
        elif expected == _EQUALS:
            self.bad = char != "="
            if not self.bad:
                self._begin(out)
                out.append(Piece(ARGUMENTS, key_as_json(self._word, self._is_first), self._index))
                self._is_first, self._expected = False, _IN_VALUE
                self._word, self._value = "", PythonValue()
        else:
            self.bad = char != ","
            self._expected = _KEY_OR_END
        return at if self.bad else at + 1

    def _begin(self, out: list[Piece]) -> None:
        """Announces the call, unless that was done already. Called where the first argument or the closing bracket is read, because
        the text before may still turn out to be no call."""
        if not self.announced:
            self._announce(self._name, out)
            out.append(Piece(ARGUMENTS, "{", self._index))

    def _argument(self, text: str, at: int, out: list[Piece]) -> int:
        written: list[str] = []
        end = self._value.feed(text, at, written)
        if written:
            out.append(Piece(ARGUMENTS, "".join(written), self._index))
        self.bad = self._value.bad
        if self._value.done:
            self._expected = _COMMA_OR_END
        return end


class Llama4Parser(DialectParser):
    """Parses replies in both forms of Llama 4's dialect: lists of calls in Python's syntax, and JSON objects. Calls stand at the
    beginning of the reply or after a marker; markers are never part of the text. names: the offered tools. Calls of other functions
    count only after <|python_start|>, because a reply may be a list or JSON that is an answer."""

    marker = START
    markers = (START, END)

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__()
        self._offered = frozenset(names)
        self._names: frozenset[str] | None = self._offered  # function names that count as calls at this point; None: any name
        self._in_list = False
        self.mode = self._start

    def opened(self) -> None:
        self._names = None if self.lead == START else self._offered
        self.lead, self.mode = "", self._start

    def gave_up(self) -> None:
        self._in_list = False

    def _start(self, text: str, at: int, out: list[Piece]) -> int:
        """Looks at the first character, apart from white space, at the reply's beginning or after a marker: a bracket begins a list
        of calls, a brace begins a call, and anything else is content. Returns the index of the first unread character."""
        at = self.skip_spaces(text, at)
        if at < len(text):
            if text[at] == "[":
                self.lead += "["
                self._in_list, self.mode = True, self._item
                return at + 1
            if text[at] == "{":
                self.begin(CallObject(self.num_calls, self.lead, self._names))
            else:
                self.no_call()
        return at

    def _item(self, text: str, at: int, out: list[Piece]) -> int:
        """Looks at the first character, apart from white space, of an item of a list of calls, and begins a call in the form that
        the character shows. If no call begins with the character, the list is content. Returns the index of the first unread
        character."""
        at = self.skip_spaces(text, at)
        if at < len(text):
            if text[at] == "{":
                self.begin(CallObject(self.num_calls, self.lead, self._names))
            elif _NAME_RUN.fullmatch(text[at]):
                self.begin(PythonCall(self.num_calls, self.lead, self._names))
            else:
                self._in_list = False
                self.no_call()
        return at

    def after(self, text: str, at: int, out: list[Piece]) -> int:
        at = self.skip_spaces(text, at)
        if at == len(text):
            return at
        char = text[at]
        if self._in_list and char == ",":
            self.lead += ","
            self.mode = self._item
        elif self._in_list and char == "]":
            self._in_list, self.lead = False, ""
        elif not self._in_list and char == ";":
            self.lead += ";"
        else:
            self.mode = self._start if not self._in_list and char in "[{" else self.content
            self._in_list = False
            return at
        return at + 1
