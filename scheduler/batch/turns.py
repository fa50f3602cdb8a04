"""Picks the model whose step runs next, so that each busy model gets its share of the device's time and its streams get tokens at
even intervals.

The rule is earliest eligible virtual deadline first, which Stoica and Abdel-Wahab published in 1995 and which Linux uses for
processes. A model's deadline is the end of its last step plus the length of one of its steps divided by its share of the device,
which is its weight divided by the sum of the weights of all busy models. The model with the earliest deadline is next, unless it is
ahead of its share by more than one step. Models with equal steps therefore alternate, and a model with short steps runs them
between the long steps of others. Deficit round robin would give the same shares, but less even intervals.

A step is never interrupted. A model whose deadline has passed therefore waits for at most one step of each other model, plus the
time it is ahead of its share.

If several models have more work than fits their turns (time slices of the device), each of their steps uses the turns of all of
them (step_limits.turns_of_step). Between two of these long steps every other busy model runs one step, whatever its deadline.
Otherwise a model could wait for two long steps in a row.
"""

from __future__ import annotations

from collections.abc import Collection

_NEWEST = 0.3  # weight of the last step in the running average of a model's step time
_FORGIVEN = 0.25  # a model that got at most this part of a share too much does not have to wait for it


class Turns:
    """Charges device time to models, by name, and picks the model whose step runs next. A turn is a time slice of the device. Times
    are device seconds, measured by the caller."""

    def __init__(self) -> None:
        self._now_s = 0.0  # all device time charged so far
        self._ahead_s: dict[str, float] = {}  # time used minus time due; negative: behind its share
        self._weight: dict[str, float] = {}
        self._step_s: dict[str, float] = {}  # average length of each model's latest steps
        self._ended_s: dict[str, float] = {}  # when each model's last step ended
        self._busy: tuple[str, ...] = ()  # busy models when `next` was called last
        self._before_pooled: set[str] = set()  # models that must run a step before the next pooled one
        self._over_s = 0.0  # seconds that steps took beyond their turns, minus what later steps left of theirs

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
        """Sets a model's weight, by which it gets device time in proportion to the other busy models; 1.0 at first. Raises
        ValueError for a weight that is not positive."""
        if not weight > 0:
            raise ValueError(f"weight {weight} of model {model} must be positive")
        self._weight[model] = weight

    @property
    def is_over(self) -> bool:
        """Returns whether the latest steps took longer, in sum, than their turns (time slices of the device), so that other models
        had to wait."""
        return self._over_s > 0

    def charge(self, model: str, seconds: float, turn_s: float | None = None) -> None:
        """Charges a model for a step that has ended and took `seconds`, and credits each busy model with a part of these seconds in
        proportion to its weight.

        turn_s: the device time that the step was allowed, in seconds: one turn (time slice of the device), or several if models
        pooled theirs; None: unlimited."""
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
        """Returns the busy model whose step is next; None if no model is busy. backlogged: busy models with more work than fits
        their turns (time slices of the device); two or more of them pool their turns.

        Time that a model leaves unused while it is alone or not busy is not given to it later. Time that a model has used beyond
        its share counts less as time passes."""
        pooling = backlogged if len(backlogged) > 1 else ()
        for name, ahead_s in self._ahead_s.items():
            if ahead_s < 0 and (name not in busy or len(busy) == 1):
                self._ahead_s[name] = 0.0
        self._busy = tuple(busy)
        if len(busy) <= 1:
            return next(iter(busy), None)
        may = [name for name in busy if self._ahead_s[name] <= self._step_s[name]]
        first = [name for name in may if name in self._before_pooled and name not in pooling]
        # All of them are ahead only if the models that were behind are no longer busy.
        chosen = min(first or may or busy, key=self._due_at)
        if chosen in pooling:
            self._before_pooled = set(busy)
        self._before_pooled.discard(chosen)
        return chosen

    def _due_at(self, model: str) -> float:
        shares = sum(self._weight[name] for name in self._busy) / self._weight[model]
        return self._ended_s[model] + shares * self._step_s[model]
