"""The base class of readers that convert one value of a call to JSON while the model writes it. It handles brackets, commas and
colons, which the notations have in common with JSON; subclasses handle strings and other words.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

SPACES = " \t\r\n"
_CLOSING = {"[": "]", "{": "}"}

# States: what is expected next. WORD, and the states that subclasses add after it, are within a string or another word.
VALUE, ITEM_OR_END, KEY_OR_END, COLON, COMMA_OR_END, WORD = range(6)


class BracketValue(ABC):
    """The state of reading one value from text that arrives in pieces. done: whether the value is complete. bad: whether the text
    is not a value in this notation. Once one of them is true, `feed` reads nothing more. A comma after the last item of a list or
    an object is allowed."""

    __slots__ = ("_before", "_expected", "_in_key", "_open", "bad", "done")

    def __init__(self) -> None:
        self._open: list[str] = []  # the closing brackets that are still to come
        self._before = ""  # a JSON comma that is held back until another item follows
        self._expected = VALUE
        self._in_key = False
        self.done = self.bad = False

    def feed(self, text: str, at: int, out: list[str]) -> int:
        """Reads text[at:] up to the end of the value or the first character that does not belong to one. Adds what was read to
        `out`, as JSON, and returns the index of the first character that was not read."""
        while at < len(text) and not (self.done or self.bad):
            if self._expected >= WORD:
                at = self._in_word(text, at, out)
            elif text[at] in SPACES:
                at += 1
            else:
                at = self._structure(text[at], at, out)
        return at

    @abstractmethod
    def _in_word(self, text: str, at: int, out: list[str]) -> int:
        """Reads text[at:] inside a string or another word, which an earlier character has begun, up to its end. Adds what was read
        to `out`, as JSON. Returns the index of the first unread character. Subclasses find in `_expected` which kind of word it
        is."""

    @abstractmethod
    def _word(self, char: str, at: int, out: list[str]) -> int:
        """Handles `char` (text[at]), the first character of a key or of a value without brackets. Sets the attribute `_expected` to
        the kind of word that begins: WORD or a state of the subclass. Sets `bad` if no key or value begins with this character.
        Returns `at` + 1, or `at` if the character must be read again as a part of the word."""

    def _structure(self, char: str, at: int, out: list[str]) -> int:
        expected = self._expected
        if expected in (ITEM_OR_END, KEY_OR_END, COMMA_OR_END) and char == self._open[-1]:
            self._before = ""
            out.append(self._open.pop())
            self._value_ended()
        elif expected == COMMA_OR_END:
            self.bad = char != ","
            self._before = ", "
            self._expected = KEY_OR_END if self._open[-1] == "}" else ITEM_OR_END
        elif expected == COLON:
            self.bad = char != ":"
            out.append(": ")
            self._expected = VALUE
        elif char in _CLOSING and expected != KEY_OR_END:
            self._begin(char, out)
            self._open.append(_CLOSING[char])
            self._expected = KEY_OR_END if char == "{" else ITEM_OR_END
        else:
            self._in_key = expected == KEY_OR_END
            return self._word(char, at, out)
        return at if self.bad else at + 1

    def _begin(self, written: str, out: list[str]) -> None:
        """Adds `written`, which is or begins a key or value, to `out`; before it the comma that was held back, if there is one."""
        out.append(self._before + written)
        self._before = ""

    def _key_ended(self) -> None:
        self._in_key, self._expected = False, COLON

    def _value_ended(self) -> None:
        self._expected = COMMA_OR_END
        self.done = not self._open
