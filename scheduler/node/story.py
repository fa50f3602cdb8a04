"""Records what happened to each model and to the last requests, for `hearth why`. The number of lines is bounded."""

from __future__ import annotations

from collections import OrderedDict, deque

_LINES, _REQUESTS = 48, 1024


class Story:
    """The latest events in the life of one model, as lines for operators. At most 48 lines are kept; the oldest are dropped
    first."""

    __slots__ = ("_lines",)

    def __init__(self) -> None:
        self._lines: deque[tuple[float, str, str]] = deque(maxlen=_LINES)

    def tell(self, now: float, cause: str, text: str) -> None:
        self._lines.append((now, cause, text))

    def lines(self, now: float) -> list[str]:
        """Returns the lines, the oldest first, such as `-12.3 s req-42 ready -> draining: makes room for b`. Times are relative to
        `now`."""
        return [f"{at - now:+.1f} s  {cause}  {text}" for at, cause, text in self._lines]


class EndedRequests:
    """The outcomes of the last 1,024 requests that have ended, by request id, for `hearth why`."""

    __slots__ = ("_ends",)

    def __init__(self) -> None:
        self._ends: OrderedDict[int, tuple[float, str, str]] = OrderedDict()

    def note(self, request_id: int, now: float, model: str, how: str) -> None:
        self._ends[request_id] = (now, model, how)
        if len(self._ends) > _REQUESTS:
            self._ends.popitem(last=False)

    def lines(self, request_id: int, now: float) -> list[str]:
        end = self._ends.get(request_id)
        return [] if end is None else [f"{end[0] - now:+.1f} s  request {request_id} of {end[1]}: {end[2]}"]
