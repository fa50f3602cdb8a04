"""Learns how long a model's predictor takes to process a step and to draft tokens after it."""

from __future__ import annotations

_NEWEST = 0.2  # weight of a new time


class ProposingCosts:
    """The seconds that a model's predictor takes to process a step and to draft tokens after it, by classes of the number of
    sequences: 1, 2 to 3, 4 to 7 and so on. An unknown time counts as 0, so that drafting is tried."""

    def __init__(self) -> None:
        self._seen: dict[int, float] = {}
        self._drafting: dict[int, float] = {}  # class -> seconds to draft one token for each sequence

    def note(self, num_sequences: int, num_drafted: int, seen_s: float, drafting_s: float) -> None:
        """Updates the learned times of the predictor with those measured in one step, in which each of num_sequences sequences had
        one token. num_drafted: the most tokens drafted for any sequence. seen_s: how many seconds the predictor took to process the
        step. drafting_s: how many seconds it then took to draft."""
        size = num_sequences.bit_length()
        _learn(self._seen, size, seen_s)
        if num_drafted:
            _learn(self._drafting, size, drafting_s / num_drafted)

    def knows(self, num_sequences: int) -> bool:
        """Returns whether the time to draft for about num_sequences sequences has been measured."""
        return num_sequences.bit_length() in self._drafting

    def seconds(self, num_sequences: int, num_drafted: int) -> float:
        """Returns how many seconds the predictor takes to process a step of num_sequences sequences and then to draft num_drafted
        tokens for each of them."""
        size = num_sequences.bit_length()
        return self._seen.get(size, 0.0) + num_drafted * self._drafting.get(size, 0.0)


def _learn(known: dict[int, float], size: int, seconds: float) -> None:
    known[size] = known.get(size, seconds) + _NEWEST * (seconds - known.get(size, seconds))
