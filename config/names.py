"""Checks entries of the configuration's table `[names]`, which says which models answer to a further name or a pattern of names."""

from __future__ import annotations

from typing import Any

WILDCARDS = "*?"  # any text, and any one character; both also match "/"
FORM = 'must be a model\'s name or a list of them, as in ["qwen3-4b", "qwen3-1.7b"]'


def is_pattern(name: str) -> bool:
    return any(each in name for each in WILDCARDS)


def problem(name: str, value: Any) -> str:
    """Returns what is wrong with an entry `name = value` of the table `[names]`, or "" if it can be used. value: as parsed from
    TOML."""
    if not name:
        return "a name needs at least one character"
    if isinstance(value, dict):
        return f'{FORM}; a name with "." or "/" goes in quotes'
    targets = [value] if isinstance(value, str) else value
    if not isinstance(targets, list) or not targets or not all(isinstance(each, str) and each for each in targets):
        return f"{value!r} {FORM}"
    for at, target in enumerate(targets):
        if is_pattern(target):
            return f"{target!r} must be a model's name; patterns are for the left side"
        if target in targets[:at]:
            return f"{target!r} is named twice"
    return ""
