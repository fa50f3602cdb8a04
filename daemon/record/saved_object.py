"""Reads the JSON object in a file of the state folder. If it is not what hearthd writes there, the error names the key that is
wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any


class DamagedFile(Exception):
    """Raised for a file that does not hold what hearthd writes there. The message names the key and what is expected."""


def saved_object(data: bytes, version: int) -> dict[str, Any]:
    """Returns the JSON object in the file's content. version: the value that its key `version` must have. Raises DamagedFile."""
    if not data.strip():
        raise DamagedFile("it is empty")
    try:
        values = json.loads(data)
    except json.JSONDecodeError as error:
        raise DamagedFile(f"it is no valid JSON: line {error.lineno}, column {error.colno}: {error.msg}") from None
    except (UnicodeDecodeError, RecursionError, ValueError):  # ValueError: a number of thousands of digits
        raise DamagedFile("it is no valid JSON") from None
    if not isinstance(values, dict):
        raise DamagedFile("it holds no JSON object, {...}")
    if (found := field(values, "version")) != version:
        raise DamagedFile(f"key version: {found!r}, and this hearthd reads {version}: another version of hearthd wrote it")
    return values


def field(values: dict[str, Any], key: str) -> Any:
    """Returns the value of a key. Raises DamagedFile if it is missing."""
    if key not in values:
        raise DamagedFile(f"key {key}: missing")
    return values[key]


def entries(values: dict[str, Any], key: str, is_right: Callable[[Any], bool], form: str) -> dict[str, Any]:
    """Returns the JSON object that is the value of `key`. is_right: tells whether one of its values is valid. form: what its values
    must be, in words for the error. Raises DamagedFile if it is no object, or a value is not valid."""
    found = field(values, key)
    if not isinstance(found, dict):
        raise DamagedFile(f"key {key}: must be an object")
    for name, value in found.items():
        if not is_right(value):
            raise DamagedFile(f'key {key}."{name}": must be {form}')
    return found
