"""Reads one tool call while it is being written: `{"name": …, "arguments": {…}}`, or a name followed by its arguments."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod

import msgspec

from daemon.text.tool_parsers.json_value import JsonValue
from daemon.text.tool_parsers.pieces import ARGUMENTS, BROKEN, CALL, CALL_END, CONTENT, Piece

NAME = re.compile(r"[a-zA-Z0-9_.-]{1,128}")
_NAME_RUN = re.compile(r"[a-zA-Z0-9_.-]*")
_ARGUMENT_KEYS = ("arguments", "parameters")  # Llama 3 says parameters
_OTHER_KEYS = ("type", "id")


class Call(ABC):
    """The state of reading one tool call from a reply that arrives in pieces. index: the call's number in the reply, from 0. lead:
    the markers that the call began with. announced: whether the CALL piece with the function's name was passed on. done: whether
    the call is complete. bad: whether the text turned out to be no call, after which the caller calls `give_up`."""

    __slots__ = ("_index", "_raw", "announced", "bad", "done")

    def __init__(self, index: int, lead: str) -> None:
        self._index = index
        self._raw = [lead]
        self.announced = self.done = self.bad = False

    def feed(self, text: str, at: int, out: list[Piece]) -> int:
        """Reads text[at:] until the text or the call ends, and returns the index of the first character that was not read. Adds the
        pieces of the call that were read to `out`."""
        end = self._read(text, at, out)
        self._raw.append(text[at:end])
        return end

    def give_up(self, out: list[Piece]) -> None:
        """Turns a call that is bad or was cut off into text: adds all of it that was read to `out`, as a BROKEN piece if the call
        was announced, otherwise as CONTENT."""
        raw = "".join(self._raw)
        out.append(Piece(BROKEN, raw, self._index) if self.announced else Piece(CONTENT, raw))

    def finish(self, out: list[Piece]) -> bool:
        """Called at the end of the reply: completes the call if only its closing tag is missing and the dialect allows that.
        Returns whether the call is complete then."""
        return False

    @abstractmethod
    def _read(self, text: str, at: int, out: list[Piece]) -> int:
        """Reads text[at:] as `feed` describes, and returns the index of the first unread character. Sets `done` at the call's end,
        or `bad` where the text is no call."""

    def _announce(self, name: str, out: list[Piece], call_id: str = "") -> None:
        self.announced = True
        out.append(Piece(CALL, name, self._index, call_id))

    def _last_arguments(self, value: JsonValue, text: str, at: int, out: list[Piece]) -> int:
        """Reads text[at:] into `value`, the JSON value of the arguments, and adds what was read to `out` as ARGUMENTS, as it
        stands. The call ends with the value. Returns the index of the first unread character."""
        end = value.feed(text, at)
        if end > at:
            out.append(Piece(ARGUMENTS, text[at:end], self._index))
        self.bad, self.done = value.bad, value.done
        if self.done:
            out.append(Piece(CALL_END, "", self._index))
        return end


# what CallObject expects next in the outer object
_OPEN, _KEY_OR_END, _KEY, _COLON, _VALUE, _COMMA_OR_END = range(6)


class CallObject(Call):
    """Reads a call written as a JSON object with `name` and `arguments` (or `parameters`), in any order. The arguments are an
    object, a string that holds one, or null. name_key: the key of the function's name.

    names: the functions whose calls count, where the reply may also be an answer in JSON. An object with another function, or with
    keys that a call does not have, is then no call. None: every function and all keys are accepted, because a marker of calls came
    before."""

    __slots__ = ("_arguments_seen", "_captured", "_expected", "_held", "_key", "_name_key", "_names", "_streaming", "_value")

    def __init__(self, index: int, lead: str, names: frozenset[str] | None = None, name_key: str = "name") -> None:
        super().__init__(index, lead)
        self._names, self._name_key = names, name_key
        self._expected = _OPEN
        self._key: str | None = None  # None: the next string is a key
        self._value: JsonValue | None = None  # the key or value being read
        self._captured: list[str] = []
        self._streaming = False  # whether the value is the arguments object, which is passed on as it arrives
        self._arguments_seen = False
        self._held: list[str] = []  # arguments that came before the name

    def _read(self, text: str, at: int, out: list[Piece]) -> int:
        while at < len(text) and not (self.done or self.bad):
            if self._value is not None:
                at = self._inside(self._value, text, at, out)
            elif text[at] in " \t\r\n":
                at += 1
            else:
                at = self._structure(text[at], at, out)
        return at

    def _structure(self, char: str, at: int, out: list[Piece]) -> int:
        expected = self._expected
        if expected == _VALUE:
            self._value = JsonValue()
            self._streaming = self._key in _ARGUMENT_KEYS and char == "{"
            return at
        if expected in (_KEY, _KEY_OR_END) and char == '"':
            self._value, self._key = JsonValue(), None
            return at
        if char == "}" and expected in (_KEY_OR_END, _COMMA_OR_END) and self.announced:
            if not self._arguments_seen:
                out.append(Piece(ARGUMENTS, "{}", self._index))
            out.append(Piece(CALL_END, "", self._index))
            self.done = True
            return at + 1
        wanted, following = {_OPEN: ("{", _KEY_OR_END), _COLON: (":", _VALUE), _COMMA_OR_END: (",", _KEY)}.get(expected, ("", 0))
        if char != wanted:
            self.bad = True
            return at
        self._expected = following
        return at + 1

    def _inside(self, value: JsonValue, text: str, at: int, out: list[Piece]) -> int:
        end = value.feed(text, at)
        if not self._streaming:
            self._captured.append(text[at:end])
        elif self.announced:
            if end > at:
                out.append(Piece(ARGUMENTS, text[at:end], self._index))
        else:
            self._held.append(text[at:end])
        if value.bad:
            self.bad = True
        elif value.done:
            self._value = None
            try:
                read = _string_or_null("".join(self._captured))
            except msgspec.DecodeError:  # an unpaired surrogate
                self.bad = True
                return end
            self._captured.clear()
            if self._key is None:
                self._key_read(str(read))
            else:
                self._value_read(self._key, read, out)
        return end

    def _key_read(self, key: str) -> None:
        self._key, self._expected = key, _COLON
        known = key == self._name_key or key in _ARGUMENT_KEYS
        twice = (key == self._name_key and self.announced) or (key in _ARGUMENT_KEYS and self._arguments_seen)
        self.bad = twice or (self._names is not None and not known and key not in _OTHER_KEYS)

    def _value_read(self, key: str, value: object, out: list[Piece]) -> None:
        self._expected = _COMMA_OR_END
        if key == self._name_key:
            if not isinstance(value, str) or not NAME.fullmatch(value) or (self._names is not None and value not in self._names):
                self.bad = True
                return
            self._announce(value, out)
            if self._held:
                out.append(Piece(ARGUMENTS, "".join(self._held), self._index))
                self._held.clear()
        elif key in _ARGUMENT_KEYS:
            self._arguments_seen = True
            if self._streaming:
                self._streaming = False
                return
            written = "{}" if value is None else value
            if not isinstance(written, str) or not _is_object(written):
                self.bad = True
            elif self.announced:
                out.append(Piece(ARGUMENTS, written, self._index))
            else:
                self._held.append(written)


def _string_or_null(text: str) -> object:
    """Returns the contents of a JSON string; None for null or for no text at all; any other JSON value undecoded, as bytes, because
    its content does not matter."""
    if text.startswith('"'):
        return msgspec.json.decode(text)
    return None if text in ("", "null") else text.encode()


def _is_object(text: str) -> bool:
    text = text.strip()
    value = JsonValue()
    return text.startswith("{") and value.feed(text, 0) == len(text) and value.done
