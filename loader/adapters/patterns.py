"""Matches names of modules with the keys of `rank_pattern` and `alpha_pattern`.

PEFT takes a key as a regular expression that must match the end of the module's name, from its beginning or behind a dot; of
several that match, the first counts. A key comes from a file that may hold anything, and Python's regular expressions can take any
time. So only expressions are read that can be matched in time proportional to their length and the name's: characters, `.`,
classes, groups of alternatives, and `*`, `+` and `?` behind a single character or class.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple

MAX_EXPRESSION = 256  # characters
MAX_EXPRESSIONS = 64  # keys that are more than a name
MAX_STEPS = 50_000_000  # modules x characters of their names x characters of the expressions: some seconds at most
MAX_DEPTH = 4  # of groups in groups
_NAME = re.compile(r"[\w.-]+", re.ASCII)
_CLASSES = {"d": re.compile(r"\d", re.ASCII), "w": re.compile(r"\w", re.ASCII)}


class UnreadPattern(ValueError):
    """Raised for a key that is no expression that is read here, with the reason."""


class _Atom(NamedTuple):
    """A single character. fits: tells whether it may be this one."""

    fits: Callable[[str], bool]
    may_be_absent: bool
    may_repeat: bool


class _Group(NamedTuple):
    alternatives: list[list[_Atom | _Group]]
    may_be_absent: bool


_Item = _Atom | _Group


class Patterns:
    """The keys of one mapping. A dot in a key that is otherwise a name is a dot, nothing else."""

    def __init__(self, keys: Iterable[str]) -> None:
        """Raises UnreadPattern, whose text names the key."""
        self._names: dict[str, int] = {}
        self._expressions: list[tuple[int, str, _Expression]] = []
        for order, key in enumerate(keys):
            if _NAME.fullmatch(key):
                self._names[key] = order
                continue
            if len(self._expressions) == MAX_EXPRESSIONS:
                raise UnreadPattern(f"has more than {MAX_EXPRESSIONS} keys that are expressions, not names")
            try:
                self._expressions.append((order, key, _Expression(key)))
            except UnreadPattern as error:
                raise UnreadPattern(f"{key!r} is no expression that is supported: {error}") from None

    def check_cost(self, modules: Collection[str]) -> None:
        """Raises UnreadPattern where to match all these names would take too long."""
        if sum(map(len, modules)) * sum(len(key) for _, key, _ in self._expressions) > MAX_STEPS:
            raise UnreadPattern("has too many and too long expressions for so many modules")

    def key_of(self, module: str) -> str | None:
        """Returns the first key that matches the module's name, None if none does."""
        parts = module.split(".")
        ends = (".".join(parts[at:]) for at in range(len(parts)))
        order, found = min(((self._names[end], end) for end in ends if end in self._names), default=(-1, None))
        for at, key, expression in self._expressions:
            if found is not None and at > order:
                break
            if expression.matches(module):
                return key
        return found


class _Expression:
    def __init__(self, text: str) -> None:
        if len(text) > MAX_EXPRESSION:
            raise UnreadPattern(f"it has more than {MAX_EXPRESSION} characters")
        self._from_start = text.startswith("^")
        self._text, self._at = text.removeprefix("^").removesuffix("$"), 0
        self._alternatives = self._read_alternatives(0)
        if self._at < len(self._text):
            raise UnreadPattern("a ) without its (")

    def matches(self, name: str) -> bool:
        starts = {0}
        if not self._from_start:
            starts |= {at + 1 for at, one in enumerate(name) if one == "."}
        return len(name) in _ends(self._alternatives, name, starts)

    def _read_alternatives(self, depth: int) -> list[list[_Item]]:
        found: list[list[_Item]] = [[]]
        while self._at < len(self._text) and (one := self._text[self._at]) != ")":
            self._at += 1
            if one == "|":
                found.append([])
            elif one == "(":
                found[-1].append(self._read_group(depth + 1))
            else:
                fits = self._read_single(one)
                quantifier = self._next_of("*+?")
                found[-1].append(_Atom(fits, quantifier in ("*", "?"), quantifier in ("*", "+")))
        return found

    def _read_group(self, depth: int) -> _Group:
        if depth > MAX_DEPTH:
            raise UnreadPattern(f"more than {MAX_DEPTH} groups in each other")
        self._at += 2 if self._text.startswith("?:", self._at) else 0
        alternatives = self._read_alternatives(depth)
        if not self._next_of(")"):
            raise UnreadPattern("a ( without its )")
        return _Group(alternatives, self._next_of("?") == "?")

    def _read_single(self, one: str) -> Callable[[str], bool]:
        if one == ".":
            return lambda other: True
        if one == "[":
            end = self._text.find("]", self._at + 1)
            listed = self._text[self._at : end]
            if end < 0 or not re.fullmatch(r"\^?[\w.-]+", listed, re.ASCII):
                raise UnreadPattern("[ begins no class of letters, digits, _, - and dots")
            self._at = end + 1
            try:
                pattern = re.compile(f"[{listed}]")
            except re.error as error:
                raise UnreadPattern(f"[{listed}]: {error}") from None
            return lambda other: pattern.match(other) is not None
        if one == "\\":
            one = self._text[self._at : self._at + 1]
            self._at += 1
            if one in _CLASSES:
                known = _CLASSES[one]
                return lambda other: known.match(other) is not None
            if not one or one.isalnum():
                raise UnreadPattern(f"\\{one} is not supported")
        elif not _NAME.fullmatch(one):
            raise UnreadPattern(f"{one!r} is not supported here")
        return one.__eq__

    def _next_of(self, characters: str) -> str:
        """Returns the next character and goes behind it if it is one of these, else ""."""
        one = self._text[self._at : self._at + 1]
        if not one or one not in characters:
            return ""
        self._at += 1
        return one


def _ends(alternatives: list[list[_Item]], name: str, starts: set[int]) -> set[int]:
    """Returns where in the name a match of any alternative can end that begins at any of these places."""
    found = set()
    for items in alternatives:
        places = starts
        for item in items:
            ends = _ends(item.alternatives, name, places) if isinstance(item, _Group) else _behind(item, name, places)
            places = ends | places if item.may_be_absent else ends
            if not places:
                break
        found |= places
    return found


def _behind(atom: _Atom, name: str, starts: set[int]) -> set[int]:
    """Returns the places behind one character that fits, or behind several where it may repeat."""
    found: set[int] = set()
    for at, one in enumerate(name):
        if (at in starts or (atom.may_repeat and at in found)) and atom.fits(one):
            found.add(at + 1)
    return found
