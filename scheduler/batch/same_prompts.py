"""Handles sequences with the same prompt that arrive together (as for a request with `n` answers): the first one computes the
prompt, the others wait and share its KV.
"""

from __future__ import annotations

from collections.abc import Mapping
from weakref import WeakValueDictionary

from scheduler.batch.plan import BoolArray, IntArray
from scheduler.batch.request import BatchRequest


class SamePrompts:
    """Remembers which running sequence computes which prompt. slot_of: request id -> slot. num_computed [S]: for each of S slots,
    the number of the sequence's computed tokens. held [S]: whether the sequence's next token must not be computed yet
    (BatchScheduler.hold), so that nobody should wait for it. All of these belong to the batch scheduler."""

    def __init__(self, slot_of: Mapping[int, int], num_computed: IntArray, held: BoolArray, block_tokens: int) -> None:
        self._slot_of, self._num_computed, self._held, self._block_tokens = slot_of, num_computed, held, block_tokens
        self._first: WeakValueDictionary[bytes, BatchRequest] = WeakValueDictionary()  # by the prompt's last full block

    def must_wait(self, request: BatchRequest, num_full: int) -> bool:
        """Returns whether a request must wait because a running sequence is computing the same first num_full blocks of tokens. If
        False is returned, records that this request will compute them. The request's `keys` must include those of these blocks."""
        if not num_full:
            return False
        key = request.keys[num_full - 1]
        first = self._first.get(key)
        slot = None if first is None else self._slot_of.get(first.request_id)
        if slot is not None and not self._held[slot] and int(self._num_computed[slot]) < num_full * self._block_tokens:
            return True
        self._first[key] = request
        return False
