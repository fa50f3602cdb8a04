"""Whose step is next: deficit round robin between the models of one device, on measured device time.

A model's turn grants it a quantum times its weight: the longest step among those that are busy, or `budget_s` where one of them
takes many times that. So models with like steps take them one by one: who waits waits for one step of each other, not for a
budget's worth, and nobody sits out a round for having run a little over. A turn goes on while its credit covers one more step like
its latest. A step that takes longer leaves a debt, which its model's next turns pay off before it runs again.
"""

from __future__ import annotations

from collections.abc import Collection

_NEAR = 2.0  # steps of up to so many budgets are let through every round
_NEWEST = 0.3  # weight of the last step


class Turns:
    """Models by name. Times are device seconds, measured by the caller."""

    def __init__(self, budget_s: float) -> None:
        if budget_s <= 0:
            raise ValueError(f"budget_s {budget_s} must be positive")
        self.budget_s = budget_s
        self._credit_s: dict[str, float] = {}  # in the order of turns; the first has its turn
        self._weight: dict[str, float] = {}
        self._step_s: dict[str, float] = {}  # what each one's latest steps took

    def add(self, model: str) -> None:
        self._credit_s[model] = 0.0
        self._weight[model] = 1.0
        self._step_s[model] = 0.0

    def remove(self, model: str) -> None:
        self._credit_s.pop(model, None)
        self._weight.pop(model, None)
        self._step_s.pop(model, None)

    def set_weight(self, model: str, weight: float) -> None:
        """Raises ValueError for a weight that is not positive."""
        if not weight > 0:
            raise ValueError(f"weight {weight} of model {model} must be positive")
        self._weight[model] = weight

    def charge(self, model: str, seconds: float) -> None:
        """After a step."""
        self._credit_s[model] -= seconds
        before = self._step_s[model] or seconds
        self._step_s[model] = before + _NEWEST * (seconds - before)

    def next(self, busy: Collection[str]) -> str | None:
        """The busy model whose step is next; None if none is busy. A model that is not busy keeps neither credit nor debt."""
        if len(busy) <= 1:
            for model in busy:
                self._credit_s[model] = 0.0
                return model
            return None
        credit = self._credit_s
        order = [model for model in credit if model in busy]
        for model in credit:
            if model not in busy:
                credit[model] = 0.0
        if credit[order[0]] > 0 and credit[order[0]] >= self._step_s[order[0]]:
            return order[0]
        # The turn goes on. What all have left over is nobody's advantage: it would add up to second steps.
        spare = min(credit[model] for model in order)
        if spare > 0:
            for model in order:
                credit[model] -= spare
        longest_s = max(self._step_s[model] for model in order)
        quantum_s = longest_s if 0 < longest_s <= _NEAR * self.budget_s else self.budget_s
        self._to_back(order[0])
        order = order[1:] + order[:1]
        for model in order:
            credit[model] += quantum_s * self._weight[model]
            if credit[model] > 0:
                return model
            self._to_back(model)
        # All are in debt: grant so many whole rounds at once that somebody can run.
        rounds = min(-credit[model] // (quantum_s * self._weight[model]) for model in order)
        for model in order:
            credit[model] += rounds * quantum_s * self._weight[model]
        return self.next(busy)

    def _to_back(self, model: str) -> None:
        self._credit_s[model] = self._credit_s.pop(model)
