"""Where in a TOML file a key stands, so that an error can name the line."""

from __future__ import annotations

import re
import tomllib
from typing import Any


def line_of(text: str, key: str) -> int:
    """The line (from 1) on which `key`, a dotted path as in `models."org/name".dtype`, is set, or else the table that should hold
    it; 0 where neither is there. `text` is valid TOML."""
    try:
        wanted = _path(tomllib.loads(re.sub(r"\[\d+\]\Z", "", key) + " = 0"))  # of a list the whole
    except tomllib.TOMLDecodeError:
        return 0  # a key that would have to be quoted
    best, best_length = 0, 0
    for line, path in _statements(text):
        length = len(path)
        if path[: len(wanted)] == wanted:
            return line  # the key itself, or the first statement below it
        if best_length < length and path == wanted[:length]:
            best, best_length = line, length  # a table or an inline table around it
    return best


def line_of_syntax_error(message: str) -> int:
    """The line in tomllib's own words; 0 where it names none."""
    found = re.search(r"at line (\d+)", message)
    return int(found[1]) if found else 0


def _statements(text: str) -> list[tuple[int, list[str]]]:
    """(line, full path) of each table header and each key, in the file's order. A statement is as many lines as it takes to make
    TOML by themselves: what follows `key = [` belongs to it until the bracket closes."""
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


def _path(parsed: dict[str, Any]) -> list[str]:
    """The keys of a table that holds one table that holds one ...; an inline table's own keys are not followed further than its
    first fork."""
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
