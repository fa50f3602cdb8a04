"""Computes a lower bound on the number of loads for a trace of requests, for any rule that loads a model only when a request needs
it and serves the requests in their order. Replays the requests with Belady's rule; time plays no part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from heapq import heappop, heappush

from scheduler.node.ledger import Size
from scheduler.simulate.trace import TraceRequest


def fewest_loads(trace: Sequence[TraceRequest], sizes: Mapping[str, Size], total_chunks: int) -> int:
    """Returns the fewest loads with which a trace can be served on demand and in order. sizes: model -> its size, all shares of a
    split model together. total_chunks: those of all devices together. O(n log n).

    The result is exact if all models have one size. For several sizes the exact answer is NP-hard; the result is then the better of
    two orders of victims: by next use, and by next use times size."""
    next_use = _next_uses(trace)
    return min(_replay(trace, sizes, total_chunks, next_use, by_size) for by_size in (False, True))


def _next_uses(trace: Sequence[TraceRequest]) -> list[int]:
    """Returns for each request the index in the trace of the next request for the same model, or a number beyond the trace if
    there is none."""
    last: dict[str, int] = {}
    never = 2 * len(trace) + 1
    uses = [never] * len(trace)
    for at in range(len(trace) - 1, -1, -1):
        uses[at] = last.get(trace[at].model, never)
        last[trace[at].model] = at
    return uses


def _replay(
    trace: Sequence[TraceRequest], sizes: Mapping[str, Size], total_chunks: int, next_use: Sequence[int], by_size: bool
) -> int:
    """Returns how often models are loaded if the trace is replayed on total_chunks chunks, and room is made by evicting the model
    with the largest key. sizes: model -> its size. by_size: False: the key is the time of the model's next use; True: the distance
    to its next use times its size. The distance is that at the model's last use and is not updated, which is good enough for an
    order of victims. next_use: for each request the index in the trace of the next request for the same model (_next_uses)."""
    resident: dict[str, float] = {}  # model -> its current key in the heap
    heap: list[tuple[float, str]] = []  # largest key first; stale entries are left in it
    held = num_loads = 0
    for at, request in enumerate(trace):
        name = request.model
        size = sizes[name]
        key = (next_use[at] - at) * size.chunks if by_size else float(next_use[at])
        if name not in resident:
            num_loads += 1
            room = total_chunks - size.work_space_chunks - size.chunks
            while held > room and heap:
                latest, victim = heappop(heap)
                if resident.get(victim) == -latest:
                    del resident[victim]
                    held -= sizes[victim].chunks
            held += size.chunks
        resident[name] = key
        heappush(heap, (-key, name))
    return num_loads
