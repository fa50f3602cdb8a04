"""Reports to the daemon how many tokens the experts of models have computed."""

from __future__ import annotations

from collections.abc import Callable

from engine.contracts.steps import CountsExperts
from engine.protocol import ExpertTokens, Message
from engine.serve.served_models import ServedModels

TELL_EVERY_S = 2.0


class ExpertNews:
    """Reports to the daemon how many tokens each expert has computed, for the models that have run steps since the last report; at
    most once every TELL_EVERY_S seconds. send: sends a message to the daemon."""

    def __init__(self, models: ServedModels, send: Callable[[Message], None]) -> None:
        self._models, self._send = models, send
        self._stepped: set[str] = set()  # models whose experts may have computed something that was not told
        self._told_s = 0.0

    def stepped(self, model: str) -> None:
        """Notes that a model has run a step, so that the counts of its experts are due for a report."""
        if self._counts(model) is not None:
            self._stepped.add(model)

    def wait_s(self, now: float) -> float | None:
        """Returns how many seconds it is until the next report is due; None if none is due before another step has run."""
        return max(0.0, self._told_s + TELL_EVERY_S - now) if self._stepped else None

    def tell(self, now: float, wait: bool) -> None:
        """Sends the experts' counts to the daemon, if a report is due. wait: whether to wait until the device has reported its
        counts, for times when nothing runs on it. If False, counts that the device has not reported yet are left to the next
        call."""
        if self.wait_s(now) != 0.0:
            return
        told = [self._tell(model, wait) for model in self._stepped]
        if wait:
            self._stepped.clear()
        if wait or any(told):
            self._told_s = now

    def tell_last(self, model: str) -> None:
        """Sends the counts of a model's experts since the last report, because the model is about to leave. Called while no step
        runs."""
        if model in self._stepped:
            self._stepped.discard(model)
            self._tell(model, wait=True)

    def _tell(self, model: str, wait: bool) -> bool:
        """Sends the new counts of a model's experts, if there are any, and returns whether there were. There are none if the model
        has been evicted meanwhile. wait: whether to wait until the device has reported its counts."""
        counts = self._counts(model)
        new = None if counts is None else counts.news(wait)
        if counts is None or new is None:
            return False
        self._send(ExpertTokens(model, list(counts.layers), counts.num_experts, counts.own.start, new.astype("<i8").tobytes()))
        return True

    def _counts(self, model: str) -> CountsExperts | None:
        served, share = self._models.by_name.get(model), self._models.followed.get(model)
        hosted = share if served is None else served.hosted
        return None if hosted is None else hosted.expert_counts
