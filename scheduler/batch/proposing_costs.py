"""Learns what it costs to have a model's predictor see a step and draft tokens behind it."""

from __future__ import annotations

_NEWEST = 0.2  # weight of a new time


class ProposingCosts:
    """Seconds by the number of sequences, in classes that double. Unknown ones count nothing, so that they are tried."""

    def __init__(self) -> None:
        self._seen: dict[int, float] = {}
        self._drafting: dict[int, float] = {}  # of one token for each sequence

    def note(self, num_sequences: int, num_drafted: int, seen_s: float, drafting_s: float) -> None:
        """Learns from a step in which each sequence had one token. num_drafted: how many were drafted for each, at most."""
        size = num_sequences.bit_length()
        _learn(self._seen, size, seen_s)
        if num_drafted:
            _learn(self._drafting, size, drafting_s / num_drafted)

    def knows(self, num_sequences: int) -> bool:
        """Returns whether tokens were drafted for about so many sequences."""
        return num_sequences.bit_length() in self._drafting

    def seconds(self, num_sequences: int, num_drafted: int) -> float:
        """Returns the seconds behind a step that drafts so many tokens for each of the sequences."""
        size = num_sequences.bit_length()
        return self._seen.get(size, 0.0) + num_drafted * self._drafting.get(size, 0.0)


def _learn(known: dict[int, float], size: int, seconds: float) -> None:
    known[size] = known.get(size, seconds) + _NEWEST * (seconds - known.get(size, seconds))
