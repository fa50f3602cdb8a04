"""Finds the known name that a misspelt word probably stands for, for error messages."""

from __future__ import annotations

from collections.abc import Iterable

LIKENESS = 0.75  # difflib's ratio: one or two letters of a word may differ; "bogus" and "gpus" have 0.67


def nearest(word: str, known: Iterable[str]) -> str | None:
    """Returns the name in `known` that is most like `word`, or None if none is similar enough."""
    from difflib import get_close_matches  # needed only when there is an error

    close = get_close_matches(word, list(known), 1, LIKENESS)
    return close[0] if close else None
