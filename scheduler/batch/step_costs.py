"""Learns the cost of a step, in seconds of the device, from the steps that ran. The cost has two parts: one for the step's number
of tokens, and one for its contexts. The contexts of a step are one or a few numbers that say how much its tokens attend to, such as
the number of positions whose keys and values are read.

Step sizes, that is, numbers of tokens, form classes, four between a size and its double, because matrix multiplications are
computed for multiples of some number of rows. Each class has the average seconds of its steps and their average contexts. Between
known classes the cost is interpolated; beyond the largest it is extrapolated. A larger step never costs less than a smaller one: a
class whose average is above that of a larger class is given the larger class's cost.

The seconds that a context adds per unit are learned by comparing steps of the same class: these have nearly the same number of
tokens, so the differences of their times come from their contexts. On a busy machine a fit to the latest steps varies by chance, so
the average of the fits is used. The present speed is known as a factor, the ratio of the latest steps' times to their known costs;
`least` and `tokens_within` apply it.

A size that seems too expensive is not planned, and would therefore never be measured again. A class of which fewer than three steps
have run is therefore taken to cost at most a little more than the class below it, whatever was measured: its first two steps
contain set-up work (1.3 to 3 times a step, as measured), and its third may be delayed by chance. A class that has not run for long
is forgotten, so that it is tried again.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from operator import itemgetter

NEWEST = 0.1  # weight of a new measurement in an average
_NEWEST_DRIFT = 0.2  # weight of a new measurement in the factor of the latest steps
_KEPT = 0.98  # share of the statistics of contexts that is kept with each new measurement
_UNMOVED = 0.1  # contexts that differ by less than this share of their size teach little
_NEWS = 4.0  # weight of a new fit in the average, relative to the step's share of what the fit goes by
_MOST_AT_ONCE = 1.25  # a measurement counts as at most so many times the expected cost, because it may include a stall
_MOST_DRIFT_AT_ONCE, _MOST_DRIFT = 1.5, 4.0
_FORGOTTEN = 250  # a class is forgotten after so many measurements of others: some seconds, while several models are busy
_FIRM = 3  # steps after which a class is judged by what they took
_ROOM = 1.2  # largest factor from one class's cost to the next; a larger one is taken for set-up work


def class_tokens(num_tokens: int, least_step: int = 1) -> int:
    """Returns the largest number of tokens in the class of step sizes to which num_tokens belongs. least_step: the smallest
    distance in tokens between two classes."""
    step = max(least_step, 1 << max(0, (num_tokens - 1).bit_length() - 3))
    return -(-num_tokens // step) * step


@cache
def _classes(least_step: int) -> list[int]:
    return sorted({class_tokens(tokens, least_step) for tokens in range(1, 1 << 15)})


def _product(ones: Sequence[float], others: Sequence[float]) -> float:
    total = 0.0
    for one, other in zip(ones, others, strict=False):  # a sum over a generator takes twice as long
        total += one * other
    return total


@dataclass(slots=True)
class _Class:
    """Averages over the steps of one class of step sizes. num: how many steps. contexts: the average of each of the steps' contexts
    (StepCosts). seconds: the average time. last: the number, among all measured steps, of the latest one of this class."""

    num: int
    contexts: list[float]
    seconds: float
    last: int


class StepCosts:
    """Learned costs of one model's steps on one device. Times are device seconds, measured by the caller.

    A step's contexts are num_contexts numbers that say how much its tokens attend to, for example the number of positions whose
    keys and values are read, or the number of pairs of a token and a position. The cost grows with each of them. least_step: the
    smallest distance in tokens between two classes."""

    def __init__(self, num_contexts: int = 0, least_step: int = 1) -> None:
        self._least_step, self._all_classes = least_step, _classes(least_step)
        self._classes: dict[int, _Class] = {}
        self._num = 0  # measurements so far
        self._curve: list[tuple[int, float]] | None = []  # (tokens, seconds without contexts) in order; None: to be made again
        self._each_s = [0.0] * num_contexts  # seconds for one unit of each context
        self._fitted_s = [0.0] * num_contexts  # the same by the latest fit
        self._together = [[0.0] * num_contexts for _ in range(num_contexts)]  # covariance of contexts within classes
        self._with_s = [0.0] * num_contexts  # covariance of seconds with each context
        self._drift = 1.0  # what the latest steps took, divided by their known costs

    @classmethod
    def known(cls, seconds: Callable[[int], float], each_s: Sequence[float] = (), least_step: int = 1) -> StepCosts:
        """Returns costs as if steps of all sizes had been measured, for simulations. seconds(tokens): returns the seconds of a step
        of that many tokens, without the cost of its contexts (the numbers that say how much its tokens attend to, such as positions
        read). each_s: for each context the seconds that it adds per unit. least_step: the smallest distance in tokens between two
        classes of step sizes."""
        costs = cls(len(each_s), least_step)
        costs._each_s, costs._fitted_s = list(each_s), list(each_s)
        nothing = [0.0] * len(each_s)
        costs._classes = {tokens: _Class(_FIRM, nothing, seconds(tokens), 0) for tokens in costs._all_classes}
        costs._curve = None
        return costs

    def note(self, num_tokens: int, seconds: float, contexts: Sequence[float] = ()) -> None:
        """Updates the learned costs of steps with one measured step of num_tokens tokens, at least 1, that took `seconds` device
        seconds. contexts: the num_contexts numbers that say how much its tokens attend to, such as the number of positions read."""
        at = self.filled(num_tokens)
        known = self._classes.get(at)
        self._curve = None
        self._num += 1
        if known is None or known.num < _FIRM:
            seconds /= max(1.0, self._drift)
            if known is None or seconds < known.seconds:
                known = self._classes[at] = _Class(known.num if known else 0, list(contexts), seconds, 0)
            known.num, known.last = known.num + 1, self._num
            return
        known.last = self._num
        if self._num % _FORGOTTEN == 0:
            self._forget()
        apart = [context - mean for context, mean in zip(contexts, known.contexts, strict=True)]
        expected = known.seconds + self._contexts_s(apart)
        if expected > 0:
            times = min(max(seconds / expected, 1 / _MOST_DRIFT), _MOST_DRIFT_AT_ONCE * self._drift, _MOST_DRIFT)
            self._drift += _NEWEST_DRIFT * (times - self._drift)
            seconds = min(seconds, _MOST_AT_ONCE * expected)
        known.num += 1
        weight = max(NEWEST, 1 / known.num)
        self._learn_contexts(apart, seconds - known.seconds, 1 - weight, known.contexts)
        known.seconds += weight * (seconds - known.seconds)
        for i, difference in enumerate(apart):
            known.contexts[i] += weight * difference

    def least(self) -> float:
        """Returns the lowest cost, in seconds at the present speed, among the step sizes for which a cost has been measured; 0.0 if
        there is none. The cost of contexts (the numbers that say how much a step's tokens attend to) is not included."""
        curve = self._known()
        return curve[0][1] * max(1.0, self._drift) if curve else 0.0

    @property
    def fewest_tokens(self) -> int:
        """The largest number of tokens in the smallest class of steps that has been measured; 0 if none has been."""
        return min(self._classes, default=0)

    def seconds(self, num_tokens: int, contexts: Sequence[float] = ()) -> float:
        """Returns the usual seconds of a step of num_tokens tokens; 0.0 if no step is known. contexts: how much its tokens attend
        to, such as the number of positions read. The result ignores that the latest steps may have been slower than usual."""
        curve = self._known()
        return self._base_s(curve, num_tokens) + self._contexts_s(contexts) if curve else 0.0

    def firm_seconds(self, num_tokens: int, contexts: Sequence[float] = ()) -> float:
        """Returns the usual seconds of a step of num_tokens tokens, computed only from measured steps of the same class of sizes.
        Returns 0.0 until three of them have run, because the first ones include set-up work. contexts: how much the tokens attend
        to, such as the number of positions read."""
        known = self._classes.get(self.filled(num_tokens))
        if known is None or known.num < _FIRM:
            return 0.0
        return max(0.0, known.seconds - self._contexts_s(known.contexts) + self._contexts_s(contexts))

    def hoped(self, num_tokens: int, contexts: Sequence[float] = ()) -> float:
        """Returns an optimistic cost, in seconds, of a step of num_tokens tokens; 0.0 if no step is known. It is the usual cost
        (`seconds`), except for a size of whose class fewer than three steps have run: its cost is assumed to be at most a little
        above that of the next smaller class, so that it is tried. contexts: how much the tokens attend to, such as the number of
        positions read."""
        curve = self._known()
        if not curve:
            return 0.0
        at = self.filled(num_tokens)
        seconds, known = self._base_s(curve, num_tokens), self._classes.get(at)
        smaller = bisect_right(curve, at, key=itemgetter(0)) - 1
        if smaller >= 0 and (known is None or known.num < _FIRM):
            below, low = curve[smaller]
            seconds = min(seconds, low * _ROOM ** self._classes_apart(below, at))
        return seconds + self._contexts_s(contexts)

    def tokens_within(
        self,
        seconds: float,
        most: int,
        contexts_of: Callable[[int], Sequence[float]] = lambda tokens: (),
        one_more: bool = False,
    ) -> int:
        """Returns the number of tokens of the largest step that takes at most `seconds` at the present speed; 0 if no step is known
        or none fits. most: upper limit of the result. contexts_of(tokens): returns the contexts of a step of that many tokens, the
        numbers that say how much they attend to; they grow with the step.

        Step sizes are known in classes; the result is the largest size of a class, or `most`. If only one class is known and a step
        of it takes much less than `seconds`, twice its tokens are allowed. one_more: whether the class above the largest known one
        is allowed, too, if a step of the largest known class takes at most `seconds`."""
        curve = self._known()
        if not curve:
            return 0
        seconds /= max(1.0, self._drift)
        largest, dearest = curve[-1]
        tried = 0
        if self._classes[largest].num > 1:
            dearest += self._contexts_s(contexts_of(largest))
            if len(curve) == 1 and dearest <= seconds / _ROOM:
                tried = 2 * largest
            elif one_more and dearest <= seconds:
                tried = self.filled(largest + 1)

        def too_dear(tokens: int) -> bool:
            return tokens > tried and self._base_s(curve, tokens) + self._contexts_s(contexts_of(tokens)) > seconds

        if not too_dear(most):
            return most
        classes = self._all_classes
        at = bisect_right(classes, False, hi=bisect_right(classes, most - 1), key=too_dear)
        return classes[at - 1] if at else 0

    def filled(self, num_tokens: int) -> int:
        """Returns the largest number of tokens in the class of step sizes that num_tokens belongs to. All steps of a class are
        taken to cost the same."""
        return class_tokens(num_tokens, self._least_step)

    def _forget(self) -> None:
        """Drops the classes of step sizes that have not run for long. The class of the smallest steps is kept, because `least`
        always needs it."""
        fewest = self.fewest_tokens
        self._classes = {at: known for at, known in self._classes.items() if at == fewest or self._num - known.last < _FORGOTTEN}

    def _learn_contexts(self, apart: list[float], seconds: float, weight: float, size: list[float]) -> None:
        """Updates, from one measured step, the seconds that each context (a number that says how much a step's tokens attend to)
        adds per unit. Compares the step with the averages of its class of step sizes, by one pass of coordinate descent on least
        squares; no result is below zero. apart: each context of the step minus its average in the class. seconds: the step's time
        minus the average time of the class. weight: the step's weight in the fit, from 0 to 1. size: the average of each context in
        the class."""
        each, together, with_s = self._fitted_s, self._together, self._with_s
        for i, difference in enumerate(apart):
            row = together[i]
            for j, other in enumerate(apart):
                row[j] = _KEPT * row[j] + weight * difference * other
            with_s[i] = _KEPT * with_s[i] + weight * difference * seconds
        for i, row in enumerate(together):
            firm = row[i] + (_UNMOVED * size[i]) ** 2
            if firm > 0:
                each[i] = max(0.0, each[i] + (with_s[i] - _product(row, each)) / firm)
                news = min(1.0, _NEWS * weight * apart[i] ** 2 / firm)  # costs of contexts that stay the same are not forgotten
                self._each_s[i] += news * (each[i] * row[i] / firm - self._each_s[i])

    def _contexts_s(self, contexts: Sequence[float]) -> float:
        return _product(self._each_s, contexts)

    def _base_s(self, curve: list[tuple[int, float]], num_tokens: int) -> float:
        num_tokens = self.filled(num_tokens)
        at = bisect_left(curve, num_tokens, key=itemgetter(0))
        if at == 0:
            return curve[0][1]
        few, low = curve[at - 1]
        if at == len(curve):
            if at == 1 or num_tokens > 2 * few or self._classes[few].num < _FIRM:
                return low * num_tokens / few
            fewest, lowest = curve[0]  # neighbours are too close to tell a slope
            return low + (low - lowest) * (num_tokens - few) / (few - fewest)
        many, high = curve[at]
        return low + (high - low) * (num_tokens - few) / (many - few)

    def _classes_apart(self, one: int, other: int) -> int:
        return bisect_left(self._all_classes, other) - bisect_left(self._all_classes, one)

    def _known(self) -> list[tuple[int, float]]:
        if self._curve is None:
            curve, above = [], float("inf")
            for at, seconds in reversed(self._without_contexts()):
                above = min(above, seconds)
                curve.append((at, above))
            self._curve = curve[::-1]
        return self._curve

    def _without_contexts(self) -> list[tuple[int, float]]:
        """Returns (tokens, seconds) for each known class of step sizes, in ascending order. tokens: the largest size in the class.
        seconds: its average time minus the cost of its contexts (the numbers that say how much a step attends to). A class with
        fewer than three steps counts as at most a little more expensive than the class below it."""
        found: list[tuple[int, float]] = []
        for at, known in sorted(self._classes.items()):
            seconds = max(0.0, known.seconds - self._contexts_s(known.contexts))
            if known.num < _FIRM and found:
                below, low = found[-1]
                seconds = min(seconds, low * _ROOM ** self._classes_apart(below, at))
            found.append((at, seconds))
        return found
