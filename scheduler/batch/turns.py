"""Whose step is next: equal shares of one device's time, in the order that keeps everybody's streams even.

While several models are busy, a model's share would give it one of its steps in as much time as one of its steps takes, times the
shares there are: so long after its last step it is due again, and who is due first is next. Models with like steps so take them one
by one, in one order; one with short steps has them between the others' long ones, not all in a row. Nobody is ahead of its share by
more than a step: who is waits, whenever it is due. (Earliest eligible virtual deadline first, as Stoica and Abdel-Wahab named it in
1995 and as Linux shares processors; deficit round robin keeps the same shares, but has the second step of a turn right behind the
first, and where steps are noisy one is taken in place of another's.)

Steps are never broken off. So after it is due a model waits for one step of each other at most, and for what it is ahead.

Where several have more to do than fits their turns, a step of theirs takes the turns of all of them (step_limits.turns_of_step). So
between two such steps everybody else has one, whoever is due: else a neighbour might wait for those turns twice.
"""

from __future__ import annotations

from collections.abc import Collection

_NEWEST = 0.3  # weight of the last step in what a model's steps take
_FORGIVEN = 0.25  # of a share: who has so much more than its own is not made to wait for it


class Turns:
    """Models by name. Times are device seconds, measured by the caller."""

    def __init__(self) -> None:
        self._now_s = 0.0  # of device time that was charged
        self._ahead_s: dict[str, float] = {}  # of its share: time had less time due; below zero: behind
        self._weight: dict[str, float] = {}
        self._step_s: dict[str, float] = {}  # what each one's latest steps took
        self._ended_s: dict[str, float] = {}  # when its last step did
        self._busy: tuple[str, ...] = ()  # as last seen
        self._before_pooled: set[str] = set()  # who is to have a step before the next of those that pool
        self._over_s = 0.0  # what steps took beyond their turns, less what later ones left of theirs

    def add(self, model: str) -> None:
        self._ahead_s[model] = self._step_s[model] = 0.0
        self._weight[model] = 1.0
        self._ended_s[model] = self._now_s

    def remove(self, model: str) -> None:
        for column in (self._ahead_s, self._weight, self._step_s, self._ended_s):
            column.pop(model, None)
        self._busy = tuple(name for name in self._busy if name != model)
        self._before_pooled.discard(model)

    def set_weight(self, model: str, weight: float) -> None:
        """Raises ValueError for a weight that is not positive."""
        if not weight > 0:
            raise ValueError(f"weight {weight} of model {model} must be positive")
        self._weight[model] = weight

    @property
    def is_over(self) -> bool:
        """Whether the latest steps took longer than their turns, all in all: others have waited for it."""
        return self._over_s > 0

    def charge(self, model: str, seconds: float, turn_s: float | None = None) -> None:
        """After a step. Its time was due to all that were busy, by weight. turn_s: what its turn, or turns, came to; None: any."""
        self._over_s = 0.0 if turn_s is None else max(0.0, self._over_s + seconds - turn_s)
        self._now_s += seconds
        self._ended_s[model] = self._now_s
        before = self._step_s[model] or seconds
        self._step_s[model] = before + _NEWEST * (seconds - before)
        shared = len(self._busy) > 1
        if shared:
            self._ahead_s[model] += seconds
        total = sum(self._weight[name] for name in self._busy)
        for name, ahead_s in self._ahead_s.items():
            due_s = seconds * self._weight[name] / total if total else 0.0
            if ahead_s > due_s:
                self._ahead_s[name] = max(0.0, ahead_s - (1 + _FORGIVEN) * due_s)
            elif ahead_s > 0 or (shared and name in self._busy):
                self._ahead_s[name] = ahead_s - due_s

    def next(self, busy: Collection[str], backlogged: Collection[str] = ()) -> str | None:
        """The busy model whose step is next; None if none is busy. Who is alone or not busy falls behind by nothing; what it is
        ahead is made up for as time passes. backlogged: of the busy, who have more to do than fits their turns; if
        there are several, their steps take each other's."""
        pooling = backlogged if len(backlogged) > 1 else ()
        for name, ahead_s in self._ahead_s.items():
            if ahead_s < 0 and (name not in busy or len(busy) == 1):
                self._ahead_s[name] = 0.0
        self._busy = tuple(busy)
        if len(busy) <= 1:
            return next(iter(busy), None)
        may = [name for name in busy if self._ahead_s[name] <= self._step_s[name]]
        first = [name for name in may if name in self._before_pooled and name not in pooling]
        # All are ahead only where those who were behind have gone since.
        chosen = min(first or may or busy, key=self._due_at)
        if chosen in pooling:
            self._before_pooled = set(busy)
        self._before_pooled.discard(chosen)
        return chosen

    def _due_at(self, model: str) -> float:
        shares = sum(self._weight[name] for name in self._busy) / self._weight[model]
        return self._ended_s[model] + shares * self._step_s[model]
