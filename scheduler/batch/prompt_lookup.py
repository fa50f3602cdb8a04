"""Drafts tokens from a sequence's own text: those that followed an earlier occurrence of its last tokens (prompt lookup)."""

from __future__ import annotations

import numpy as np

from scheduler.batch.plan import IntArray

FEWEST_TOKENS = 2  # shortest repeated run of tokens that counts as a match
MOST_TOKENS = 8  # most tokens compared: longer matches do not predict better


def looked_up(tokens: IntArray, num_drafted: int) -> IntArray:
    """Returns num_drafted tokens that may follow `tokens`, or an empty array if the last tokens have not occurred before.

    The draft is what followed an earlier occurrence of the last tokens, at least FEWEST_TOKENS of them: the longest such match, and
    of several equally long ones the latest. If fewer than num_drafted tokens follow that occurrence, they are repeated, because the
    text is then likely to repeat itself."""
    last = len(tokens) - 1
    if last < FEWEST_TOKENS:
        return tokens[:0]
    (ends,) = (tokens[:last] == tokens[last]).nonzero()  # arrays' methods: numpy's functions take longer than the arrays' work
    for back in range(1, MOST_TOKENS):
        long_enough = ends[ends.searchsorted(back) :]
        longer = long_enough[tokens[long_enough - back] == tokens[last - back]]
        if not len(longer):
            if back < FEWEST_TOKENS:
                return tokens[:0]
            break
        ends = longer
    first = int(ends[-1]) + 1
    return tokens[first + np.arange(num_drafted) % (len(tokens) - first)]
