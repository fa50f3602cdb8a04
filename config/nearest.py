"""What a misspelt name was meant to be, for error messages."""

from __future__ import annotations

from collections.abc import Iterable

LIKENESS = 0.75  # of difflib: one or two letters of a word may differ; "bogus" and "gpus" have 0.67


def nearest(word: str, known: Iterable[str]) -> str | None:
    """Returns the one of `known` that is most like `word`, None where none is nearly the same."""
    from difflib import get_close_matches  # for errors alone

    close = get_close_matches(word, list(known), 1, LIKENESS)
    return close[0] if close else None
