"""Learns costs: how long a load takes, and how often a model is requested."""

from __future__ import annotations

from math import log
from typing import TypeVar

K = TypeVar("K")

_NEW = 0.3  # weight of the newest figure in a learned average
_LOG_2 = log(2)


class LoadCosts:
    """Predicts the seconds of loads onto one device, from disk and from host memory, and the seconds saved by copying a token's KV
    instead of computing it. The predictions start from the given bandwidths and are learned from measurements."""

    __slots__ = ("_from_host", "_seconds", "bandwidth_bytes_per_s", "copy_bytes_per_s", "overhead_s", "prefill_tokens_per_s")

    def __init__(self, bandwidth_bytes_per_s: float, overhead_s: float, copy_bytes_per_s: float = 4e9) -> None:
        self.bandwidth_bytes_per_s = bandwidth_bytes_per_s
        self.overhead_s = overhead_s
        self.copy_bytes_per_s = copy_bytes_per_s  # bandwidth between host memory and the device
        self.prefill_tokens_per_s: dict[str, float] = {}  # model -> measured speed of prompts
        self._seconds: dict[tuple[str, int], float] = {}
        self._from_host: dict[tuple[str, int], float] = {}

    def predict_s(self, model: str, weights_bytes: int) -> float:
        """Returns the predicted seconds of a load from disk: the average of this model's loads of weights_bytes bytes; before the
        first one, overhead_s plus the bytes divided by the bandwidth."""
        known = self._seconds.get((model, weights_bytes))
        return known if known is not None else self.overhead_s + weights_bytes / self.bandwidth_bytes_per_s

    def predict_from_host_s(self, model: str, weights_bytes: int) -> float:
        """Returns the predicted seconds of a load from host memory, at most those of a load from disk."""
        known = self._from_host.get((model, weights_bytes))
        seconds = known if known is not None else weights_bytes / self.copy_bytes_per_s
        return min(seconds, self.predict_s(model, weights_bytes))

    def saved_s_per_token(self, model: str, kv_bytes_per_token: float) -> float:
        """Returns how many seconds are saved if a token's KV is copied back from host memory instead of computed; negative if
        computing is faster. kv_bytes_per_token: the bytes of the KV of one token. A model whose prompts have not been measured is
        assumed to need 1 s to compute a token."""
        rate = self.prefill_tokens_per_s.get(model)
        return (1 / rate if rate else 1.0) - kv_bytes_per_token / self.copy_bytes_per_s

    def learn(self, model: str, weights_bytes: int, seconds: float) -> None:
        """Updates the model's average load time and the disk's average bandwidth with the measurement of one load of weights_bytes
        bytes from disk, which took `seconds`."""
        _average(self._seconds, (model, weights_bytes), seconds)
        transfer_s = seconds - self.overhead_s
        if transfer_s > 0 and weights_bytes > 0:
            self.bandwidth_bytes_per_s = _averaged_bandwidth(self.bandwidth_bytes_per_s, transfer_s / weights_bytes)

    def learn_from_host(self, model: str, weights_bytes: int, seconds: float, copy_s: float) -> None:
        """Updates the model's average load time and the average bandwidth of copies from host memory with the measurement of one
        load of weights_bytes bytes from host memory, which took `seconds`. copy_s: how many of these seconds were spent copying; 0:
        not reported."""
        _average(self._from_host, (model, weights_bytes), seconds)
        if copy_s > 0 and weights_bytes > 0:
            self.copy_bytes_per_s = _averaged_bandwidth(self.copy_bytes_per_s, copy_s / weights_bytes)

    def learn_prefill(self, model: str, num_tokens: int, seconds: float) -> None:
        """Updates the model's average speed of computing prompts with the measurement of one request: num_tokens of its prompt were
        computed, and its first token came `seconds` after the prompt had been begun."""
        if num_tokens > 0 and seconds > 0:
            _average(self.prefill_tokens_per_s, model, num_tokens / seconds)

    def forget(self, model: str, weights_bytes: int) -> None:
        self._seconds.pop((model, weights_bytes), None)
        self._from_host.pop((model, weights_bytes), None)
        self.prefill_tokens_per_s.pop(model, None)


def _average(known: dict[K, float], key: K, new: float) -> None:
    old = known.get(key)
    known[key] = new if old is None else old + _NEW * (new - old)


def _averaged_bandwidth(bytes_per_s: float, new_s_per_byte: float) -> float:
    """Returns the bandwidth bytes_per_s, averaged with the newest measurement, new_s_per_byte, which is in seconds per byte. The
    average is taken over seconds per byte, so that a single very fast load, of a cached file, has little influence."""
    per_byte = 1 / bytes_per_s
    return 1 / (per_byte + _NEW * (new_s_per_byte - per_byte))


class Rate:
    """A rate in events per second: the mean of two exponentially weighted averages with half-lives of 1 and 15 minutes, so that a
    burst counts at once and a steady stream is not forgotten in a short gap."""

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
        self._short += _LOG_2 / self.SHORT_S
        self._long += _LOG_2 / self.LONG_S

    def per_s(self, now: float) -> float:
        passed = max(0.0, now - self._at)
        return (self._short * 2.0 ** (-passed / self.SHORT_S) + self._long * 2.0 ** (-passed / self.LONG_S)) / 2

    def recent_per_s(self, now: float) -> float:
        """Returns the rate of the last minutes, in events per second: the average with the half-life of 1 minute alone."""
        return self._short * 2.0 ** (-max(0.0, now - self._at) / self.SHORT_S)
