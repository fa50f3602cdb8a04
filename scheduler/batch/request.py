"""Defines a request as the batch scheduler holds it while it waits, and the queue in which requests wait."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from scheduler.batch.plan import IntArray, Sampling
from scheduler.batch.prefix_cache import tail_key
from scheduler.shares import Shares


@dataclass(slots=True, weakref_slot=True)
class BatchRequest:
    """A waiting request. tokens: the prompt; after a resubmission or preemption also the output so far, whose KV is then computed
    again with that of the prompt.

    `order` is its place in the order of arrival. A preempted request keeps its `order`, so it waits in front of later requests of
    its tenant and priority."""

    request_id: int
    tokens: IntArray
    num_prompt: int
    params: Sampling
    tenant: str = ""
    cache_salt: str = ""  # requests with different salts share no cached prefix
    weight: float = 1.0  # the tenant's share
    priority: int = 0  # compared with other requests of its tenant
    order: int = 0
    keys: list[bytes] = field(default_factory=list)  # keys of the full blocks of `tokens`, as far as computed
    num_cached: int = 0
    num_recomputed: int = 0  # tokens of a resubmitted request that were computed again
    began_s: float = 0.0  # the time given to the plan that last admitted it; 0: none was given
    has_first_token: bool = False
    constrained: bool = False  # SequenceTable.constrained
    held: bool = False  # constrained, and which tokens may follow its last one is not known yet
    prediction: IntArray = field(default_factory=lambda: np.zeros(0, np.int32))  # tokens that its output may repeat in parts
    adapter: str = ""  # key of its LoRA adapter; "": none
    resubmitted: bool = False  # it came with output, and its next token is not there yet

    def num_shareable_blocks(self, block_tokens: int) -> int:
        """Returns how many of the request's first blocks of tokens may be taken from the prefix cache. The last token is always
        computed, because the next token is sampled from its logits. If log-probabilities of the prompt are to be reported, every
        token is computed."""
        return 0 if self._owes_prompt_logprobs else (len(self.tokens) - 1) // block_tokens

    def tail_key(self, seed: bytes, block_tokens: int) -> Callable[[int], bytes] | None:
        """Returns a function that returns, for a serial number, the key of the request's partial block under this number
        (prefix_cache.tail_key; sequences with the same tokens have different numbers). The partial block holds the tokens after the
        blocks that may be taken from the prefix cache, without the last token. Returns None if there are no such tokens, or if
        every token must be computed. The request's `keys` must already include those of the full blocks before it. seed: the
        `prefix_seed` of the request. block_tokens: tokens in a full block."""
        num_full = self.num_shareable_blocks(block_tokens)
        tail = self.tokens[num_full * block_tokens : -1]
        if not len(tail) or self._owes_prompt_logprobs:
            return None
        return partial(tail_key, self.keys[num_full - 1] if num_full else seed, tail)

    @property
    def _owes_prompt_logprobs(self) -> bool:
        return self.params.prompt_logprobs >= 0 and not self.has_first_token


class WaitingQueue:
    """Waiting requests. The next one is of the tenant with the fewest requests in service in proportion to its weight; of this
    tenant the highest priority comes first, then the oldest. Withdrawn requests are skipped when they would be next."""

    def __init__(self) -> None:
        self._heaps: dict[str, list[tuple[int, int, int]]] = {}  # tenant -> (-priority, order, request id)
        self._requests: dict[int, BatchRequest] = {}
        self.shares = Shares()

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._requests

    def get(self, request_id: int) -> BatchRequest | None:
        return self._requests.get(request_id)

    def requests(self) -> list[BatchRequest]:
        return list(self._requests.values())

    def by_tenant(self) -> dict[str, tuple[int, float]]:
        """Returns tenant -> (number of its waiting requests, its weight). Requests that were withdrawn may still be counted."""
        firsts = [first for tenant in list(self._heaps) if (first := self._first(tenant)) is not None]
        return {first.tenant: (len(self._heaps[first.tenant]), first.weight) for first in firsts}

    def push(self, request: BatchRequest) -> None:
        self._requests[request.request_id] = request
        heap = self._heaps.setdefault(request.tenant, [])
        heapq.heappush(heap, (-request.priority, request.order, request.request_id))

    def head(self) -> BatchRequest | None:
        firsts = [first for tenant in list(self._heaps) if (first := self._first(tenant)) is not None]
        if len(firsts) <= 1:
            return firsts[0] if firsts else None
        tenant = self.shares.least((first.tenant, first.weight, first.order) for first in firsts)
        return self._first(tenant)

    def pop(self) -> BatchRequest:
        """Removes and returns the next request, which counts as in service until `ended` is called. Raises IndexError when
        empty."""
        request = self.head()
        if request is None:
            raise IndexError("no request waits")
        heapq.heappop(self._heaps[request.tenant])
        del self._requests[request.request_id]
        self.shares.start(request.tenant, request.weight)
        return request

    def ended(self, request: BatchRequest) -> None:
        """Records that a request returned by `pop` is not in service any more, so that it does not count against its tenant any
        more."""
        self.shares.stop(request.tenant)

    def withdraw(self, request_id: int) -> bool:
        return self._requests.pop(request_id, None) is not None

    def _first(self, tenant: str) -> BatchRequest | None:
        """Returns the tenant's next request. If the tenant has no waiting request, removes the tenant's heap and returns None."""
        heap = self._heaps[tenant]
        while heap:
            _, order, request_id = heap[0]
            request = self._requests.get(request_id)
            if request is not None and request.order == order:
                return request
            heapq.heappop(heap)
        del self._heaps[tenant]
        return None
