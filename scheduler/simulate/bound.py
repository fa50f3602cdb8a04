"""Fewest loads that any rule needs which loads on demand, in the trace's order: Belady's rule, replayed with no time passing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from heapq import heappop, heappush

from scheduler.node.ledger import Size
from scheduler.simulate.trace import TraceRequest


def fewest_loads(trace: Sequence[TraceRequest], sizes: Mapping[str, Size], total_chunks: int) -> int:
    """`total_chunks`: of all devices together. Exact for models of one size; with several sizes the better of two orders (who is
    needed latest, and that times its size), since the exact answer is NP-hard. O(n log n)."""
    next_use = _next_uses(trace)
    return min(_replay(trace, sizes, total_chunks, next_use, by_size) for by_size in (False, True))


def _next_uses(trace: Sequence[TraceRequest]) -> list[int]:
    """For each request the place in the trace of its model's next one, or the trace's length times two."""
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
    """With `by_size` the product of distance and size is taken at the last use: near enough for an order of victims."""
    resident: dict[str, float] = {}  # model -> its present key
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
