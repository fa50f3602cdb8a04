"""What a load will take and how often a model is asked for: numbers learned from what happened."""

from __future__ import annotations

from math import log

_NEW = 0.3  # weight of the newest load in the learned bandwidth


class LoadCosts:
    """Predicted seconds of a load on one device."""

    __slots__ = ("_seconds", "bandwidth_bytes_per_s", "overhead_s")

    def __init__(self, bandwidth_bytes_per_s: float, overhead_s: float) -> None:
        self.bandwidth_bytes_per_s = bandwidth_bytes_per_s
        self.overhead_s = overhead_s
        self._seconds: dict[tuple[str, int], float] = {}

    def predict_s(self, model: str, weights_bytes: int) -> float:
        """What this model's loads took, else bytes over bandwidth."""
        known = self._seconds.get((model, weights_bytes))
        return known if known is not None else self.overhead_s + weights_bytes / self.bandwidth_bytes_per_s

    def learn(self, model: str, weights_bytes: int, seconds: float) -> None:
        key = (model, weights_bytes)
        known = self._seconds.get(key)
        self._seconds[key] = seconds if known is None else known + _NEW * (seconds - known)
        transfer_s = seconds - self.overhead_s
        if transfer_s > 0 and weights_bytes > 0:
            # Averaged as seconds per byte: a single quick load of a cached file must not promise the impossible.
            per_byte = 1 / self.bandwidth_bytes_per_s
            per_byte += _NEW * (transfer_s / weights_bytes - per_byte)
            self.bandwidth_bytes_per_s = 1 / per_byte

    def forget(self, model: str, weights_bytes: int) -> None:
        self._seconds.pop((model, weights_bytes), None)


class Rate:
    """Events per second: the mean of two exponentially weighted averages, with half-lives of 1 and 15 minutes, so that a burst
    counts at once and a steady stream is not forgotten in a pause."""

    __slots__ = ("_at", "_long", "_short")

    SHORT_S, LONG_S = 60.0, 900.0

    def __init__(self) -> None:
        self._short = self._long = 0.0
        self._at = 0.0

    def note(self, now: float) -> None:
        passed = now - self._at
        if passed > 0:
            self._short *= 2.0 ** (-passed / self.SHORT_S)
            self._long *= 2.0 ** (-passed / self.LONG_S)
            self._at = now
        self._short += log(2) / self.SHORT_S
        self._long += log(2) / self.LONG_S

    def per_s(self, now: float) -> float:
        passed = max(0.0, now - self._at)
        return (self._short * 2.0 ** (-passed / self.SHORT_S) + self._long * 2.0 ** (-passed / self.LONG_S)) / 2

    def recent_per_s(self, now: float) -> float:
        """The short average alone: how fast it goes now."""
        return self._short * 2.0 ** (-max(0.0, now - self._at) / self.SHORT_S)
