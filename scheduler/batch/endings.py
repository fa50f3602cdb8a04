"""Finds the sequences that end with the token just sampled: an end id of the model, a stop id of the request, or the last token
that the request allows.

In most steps no sequence ends, so this case must be fast. The ids are searched as a Python list, which takes a fraction of the time
of several numpy operations. A counter says how many steps will certainly pass before a sequence has all tokens that its request
allows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from scheduler.batch.plan import FINISH_LENGTH, FINISH_STOP, INT32_MAX, BoolArray, IntArray, Sampling, SequenceTable


class Endings:
    """Finds which sequences of a sequence table end with their newest token. end_ids: the model's end ids."""

    def __init__(self, end_ids: Sequence[int], table: SequenceTable) -> None:
        self._end_ids, self._table = frozenset(end_ids), table
        self._own: dict[int, frozenset[int]] = {}  # slot -> stop ids of its request
        self._least_left = INT32_MAX  # every sequence can have at least this many more tokens before it reaches its length

    def join(self, slot: int, params: Sampling) -> None:
        """Registers the sequence in a slot, whose columns in the sequence table are set already. params: the sampling settings of
        its request."""
        table = self._table
        self._least_left = min(self._least_left, int(table.max_total_tokens[slot] - table.num_tokens[slot]))
        if params.stop_token_ids:
            self._own[slot] = frozenset(params.stop_token_ids)

    def leave(self, slot: int) -> None:
        self._own.pop(slot, None)

    def finishes(self, slots: IntArray, ids: Sequence[int], running: IntArray, most: int = 1) -> list[int]:
        """Returns for each sequence in `slots` how it ends with its newest token: 0 if it does not end, else one of plan.FINISH_*.
        Returns [] if none ends. Must be called for every step. ids: the newest tokens, which are in the table already. running:
        slots of all running sequences. most: the most tokens that any sequence got in this step."""
        if not ids:
            return []
        self._least_left -= most
        may_stop = bool(self._own) or not self._end_ids.isdisjoint(ids)
        if self._least_left > 0 and not may_stop:
            return []
        table = self._table
        left = table.max_total_tokens[running] - table.num_tokens[running]
        self._least_left = int(left[left > 0].min(initial=INT32_MAX))
        stopped = self._stopped(slots, ids, table.num_tokens[slots])
        ended = stopped | (table.num_tokens[slots] >= table.max_total_tokens[slots])
        if not ended.any():
            return []
        finishes: list[int] = np.where(stopped, FINISH_STOP, np.where(ended, FINISH_LENGTH, 0)).tolist()
        return finishes

    def ended(self, slots: IntArray, ids: IntArray, num_tokens: IntArray) -> BoolArray:
        """Returns [len(slots)]: whether the token ids[i] ends the sequence in slots[i]. num_tokens[i]: the sequence's number of
        tokens, this one included."""
        ended: BoolArray = self._stopped(slots, ids.tolist(), num_tokens)
        return ended | (num_tokens >= self._table.max_total_tokens[slots])

    def _stopped(self, slots: IntArray, ids: Sequence[int], num_tokens: IntArray) -> BoolArray:
        """Returns [len(slots)]: whether the token ids[i] is an end id or a stop id for the sequence in slots[i], and the sequence
        has enough tokens to end with it. num_tokens[i]: the sequence's number of tokens, this one included."""
        table, end_ids, own = self._table, self._end_ids, self._own
        stop = np.array([token in end_ids for token in ids], np.bool_)
        stop &= ~table.ignore_eos[slots]
        if own:
            stop |= [token in own.get(slot, ()) for slot, token in zip(slots.tolist(), ids, strict=True)]
        return stop & (num_tokens > table.min_tokens_until[slots])
