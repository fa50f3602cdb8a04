"""Finds the line of a TOML file on which a key is set, so that an error can name it."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from typing import Any


def line_of(text: str, key: str) -> int:
    """Returns the line (from 1) on which `key` is set, or the line of the table that should contain it; 0 if neither exists. key: a
    dotted path such as `models."org/name".dtype`. text: valid TOML."""
    wanted = _wanted(key)
    return _line(_statements(text), wanted) if wanted else 0


def depth_of(text: str, key: str) -> int:
    """Returns how many parts of the dotted path `key`, counted from the outermost table, exist in `text`: all parts if the text
    sets the key itself, 0 if even the outermost table is missing. text: TOML; if it is not valid, the result is 0."""
    try:
        value: Any = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return 0
    depth = 0
    for part in _wanted(key):
        if not isinstance(value, dict) or part not in value:
            break
        value = value[part]
        depth += 1
    return depth


def lines(text: str) -> dict[tuple[str, ...], int]:
    """Returns key -> line (from 1) for each key that the text sets; the line is the one that `line_of` returns. A key is given as
    the tuple of its parts, from the outermost table inwards. text: valid TOML."""
    statements = _statements(text)
    return {path: _line(statements, list(path)) for path in _paths(tomllib.loads(text))}


def line_of_syntax_error(message: str) -> int:
    """Returns the line number that an error message of tomllib names, or 0 if it names none."""
    found = re.search(r"at line (\d+)", message)
    return int(found[1]) if found else 0


def _wanted(key: str) -> list[str]:
    """Returns the parts of a dotted path, or [] if it is not a valid TOML key. An index at its end (`device[0]`) is ignored."""
    try:
        return _path(tomllib.loads(re.sub(r"\[\d+\]\Z", "", key) + " = 0"))  # a list's entry counts as the list
    except tomllib.TOMLDecodeError:
        return []


def _line(statements: list[tuple[int, list[str]]], wanted: list[str]) -> int:
    best, best_length = 0, 0
    for line, path in statements:
        length = len(path)
        if path[: len(wanted)] == wanted:
            return line  # this line sets the key itself, or is the first statement below it
        if best_length < length and path == wanted[:length]:
            best, best_length = line, length  # this line opens a table, or an inline table, that contains the key
    return best


def _statements(text: str) -> list[tuple[int, list[str]]]:
    """Returns (line, full path) for each table header and each key that a TOML text sets, in the file's order. A statement ends
    with the first line at which its text is valid TOML by itself: for example, `key = [` continues until the bracket is closed."""
    found: list[tuple[int, list[str]]] = []
    table: list[str] = []
    held, first = "", 0
    for number, line in enumerate(text.splitlines(), 1):
        if not held:
            if not line.strip() or line.lstrip().startswith("#"):
                continue
            first = number
        held += line + "\n"
        try:
            parsed = tomllib.loads(held)
        except tomllib.TOMLDecodeError:
            continue
        header = held.lstrip().startswith("[")
        held = ""
        path = _path(parsed)
        if header:
            table = path
            found.append((first, path))
        else:
            found.append((first, table + path))
    return found


def _paths(table: dict[str, Any], before: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yields the path of every key in a table and in the tables within it, outermost key first. before: the path of the table
    itself, with which each result begins."""
    for key, value in table.items():
        yield (*before, key)
        if isinstance(value, dict):
            yield from _paths(value, (*before, key))


def _path(parsed: dict[str, Any]) -> list[str]:
    """Returns the path of the key that one statement sets, as the keys from the outermost table inwards. parsed: the TOML of a
    table header or of one `key = value`. The path descends as long as a table has exactly one key."""
    path = []
    value: Any = parsed
    while isinstance(value, list | dict) and len(value) == 1:
        if isinstance(value, list):
            if not isinstance(value[0], dict):
                break
            value = value[0]
            continue
        ((key, value),) = value.items()
        path.append(key)
    return path
