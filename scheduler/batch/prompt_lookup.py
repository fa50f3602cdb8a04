"""Drafts tokens from a sequence's own text: what followed its last tokens where they stood before (prompt lookup)."""

from __future__ import annotations

import numpy as np

from scheduler.batch.plan import IntArray

FEWEST_TOKENS = 2  # that must have stood together before
MOST_TOKENS = 8  # that are compared: more would not choose better


def looked_up(tokens: IntArray, num_drafted: int) -> IntArray:
    """Returns num_drafted tokens that may follow `tokens`, or none.

    They are those that followed the latest earlier place at which as many of the last tokens stand as anywhere, at least
    FEWEST_TOKENS of them. Where that place is so near the end that fewer tokens follow it, the text repeats itself, and the draft
    repeats it further."""
    last = len(tokens) - 1
    if last < FEWEST_TOKENS:
        return tokens[:0]
    ends = np.flatnonzero(tokens[:last] == tokens[last])
    for back in range(1, MOST_TOKENS):
        long_enough = ends[np.searchsorted(ends, back) :]
        longer = long_enough[tokens[long_enough - back] == tokens[last - back]]
        if not len(longer):
            if back < FEWEST_TOKENS:
                return tokens[:0]
            break
        ends = longer
    first = int(ends[-1]) + 1
    return tokens[first + np.arange(num_drafted) % (len(tokens) - first)]
