"""A request as the batch scheduler keeps it while it waits, and the queue it waits in."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

from scheduler.batch.plan import IntArray, Sampling


@dataclass(slots=True)
class BatchRequest:
    """tokens: prompt, then the output so far (a resubmission or a preemption has some); both are computed again.

    `order` is the place in first-come order and survives preemption, so a preempted request waits in front of its priority.
    """

    request_id: int
    tokens: IntArray
    num_prompt: int
    params: Sampling
    cache_salt: str = ""
    priority: int = 0
    order: int = 0
    keys: list[bytes] = field(default_factory=list)  # of the full blocks of `tokens`, as far as they are known
    num_cached: int = 0
    has_first_token: bool = False
    constrained: bool = False  # SequenceTable.constrained
    held: bool = False  # constrained, and what may follow its last token is not known yet


class WaitingQueue:
    """Highest priority first, then first come first served. Withdrawn requests are skipped when their turn comes."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, int]] = []
        self._requests: dict[int, BatchRequest] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._requests

    def get(self, request_id: int) -> BatchRequest | None:
        return self._requests.get(request_id)

    def push(self, request: BatchRequest) -> None:
        self._requests[request.request_id] = request
        heapq.heappush(self._heap, (-request.priority, request.order, request.request_id))

    def head(self) -> BatchRequest | None:
        heap = self._heap
        while heap:
            _, order, request_id = heap[0]
            request = self._requests.get(request_id)
            if request is not None and request.order == order:
                return request
            heapq.heappop(heap)
        return None

    def pop(self) -> BatchRequest:
        """Raises IndexError when empty."""
        request = self.head()
        if request is None:
            raise IndexError("no request waits")
        heapq.heappop(self._heap)
        del self._requests[request.request_id]
        return request

    def withdraw(self, request_id: int) -> bool:
        return self._requests.pop(request_id, None) is not None
