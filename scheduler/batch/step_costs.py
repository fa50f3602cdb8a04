"""What a step of so many tokens costs, learned from the steps that ran.

Known are points (tokens, seconds), one for each power of two. Between them cost is a straight line. A larger step costs no less
than a smaller one, so a point above a later one (a first product's set-up, a stall) counts as that one. What makes all steps of the
moment dearer than those known, long contexts above all, is a factor that follows the latest steps.
"""

from __future__ import annotations

from itertools import pairwise

_NEWEST = 0.3  # weight of a new measurement
_MOST_DRIFT = 8.0
_ROOM = 1.2  # a larger step than any known is tried if so many times the largest one's seconds are allowed


class StepCosts:
    """Of one model on one device. Times are device seconds, measured by the caller."""

    def __init__(self) -> None:
        self._points: dict[int, tuple[float, float]] = {}  # bit length of the tokens -> tokens, seconds
        self._curve: list[tuple[float, float]] | None = []  # the points in order; None: to be made again
        self._drift = 1.0  # what the latest steps took, over what their points say

    def note(self, num_tokens: int, seconds: float) -> None:
        """A step of num_tokens > 0 took `seconds`."""
        expected = self.seconds(num_tokens)
        if expected > 0:
            self._drift += _NEWEST * (min(max(seconds / expected, 1 / _MOST_DRIFT), _MOST_DRIFT) - self._drift)
        at = num_tokens.bit_length()
        known = self._points.get(at)
        if known is not None:
            tokens, before = known
            # one stall must not make every later step small
            seconds = before + _NEWEST * (min(seconds, 2 * before) - before)
            self._points[at] = tokens + _NEWEST * (num_tokens - tokens), seconds
        else:
            self._points[at] = float(num_tokens), seconds
        self._curve = None

    def least(self) -> float:
        """The cheapest step; 0.0 if none is known."""
        curve = self._known()
        return curve[0][1] if curve else 0.0

    def seconds(self, num_tokens: int) -> float:
        """Of a step of num_tokens at other times; 0.0 if no step is known."""
        curve = self._known()
        if not curve:
            return 0.0
        if num_tokens <= curve[0][0]:
            return curve[0][1]
        for (few, low), (many, high) in pairwise(curve):
            if num_tokens <= many:
                return low + (high - low) * (num_tokens - few) / (many - few)
        tokens, last = curve[-1]
        return last * num_tokens / tokens

    def tokens_within(self, seconds: float) -> int:
        """The largest step that takes no longer now. Beyond what is known, where there is room, twice the tokens are tried. 0 if
        none is known or even the smallest takes longer."""
        curve = self._known()
        seconds /= max(1.0, self._drift)
        if not curve or curve[0][1] > seconds:
            return 0
        for (few, low), (many, high) in pairwise(curve):
            if high > seconds:
                return int(few + (many - few) * (seconds - low) / (high - low))
        tokens, last = curve[-1]
        times = seconds / last if last > 0 else 2.0
        return int(tokens * (max(2.0, times) if times >= _ROOM else times))

    def _known(self) -> list[tuple[float, float]]:
        if self._curve is None:
            curve, above = [], float("inf")
            for at in sorted(self._points, reverse=True):
                tokens, seconds = self._points[at]
                above = min(above, seconds)
                curve.append((tokens, above))
            self._curve = curve[::-1]
        return self._curve
