"""Which sampled tokens end their sequence: the model's end ids, and a request's own."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from scheduler.batch.plan import BoolArray, IntArray, Sampling, SequenceTable


class StopIds:
    """A column beside the sequence table."""

    def __init__(self, end_ids: Sequence[int], table: SequenceTable) -> None:
        self._end_ids, self._table = tuple(end_ids), table
        self._own: list[frozenset[int]] = [frozenset()] * len(table.request_id)
        self._has_own: BoolArray = np.zeros(len(table.request_id), np.bool_)

    def join(self, slot: int, params: Sampling) -> None:
        self._own[slot] = frozenset(params.stop_token_ids)
        self._has_own[slot] = bool(params.stop_token_ids)

    def stopped(self, slots: IntArray, ids: IntArray, position: IntArray) -> BoolArray:
        """[len(slots)] whether the token just sampled is an end id that counts. position: the token's index."""
        table = self._table
        stop = np.zeros(len(ids), np.bool_)
        for end in self._end_ids:
            stop |= ids == end
        if stop.any():
            stop &= ~table.ignore_eos[slots]
        own = self._has_own[slots]
        if own.any():
            for row in np.flatnonzero(own).tolist():
                stop[row] |= int(ids[row]) in self._own[int(slots[row])]
        if stop.any():
            stop &= position >= table.min_tokens_until[slots]
        return stop
