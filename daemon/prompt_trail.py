"""The log-probabilities of one prompt's tokens, as its engine tells them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from engine.protocol import PromptLogprobs


class PromptTrail:
    """num_top: alternatives wanted to each token; the engine may tell more."""

    def __init__(self, num_top: int) -> None:
        self.num_top = num_top
        self._num_told = 0  # alternatives to each token that are told
        # of the prompt's second token on
        self._chosen: list[float] = []
        self._ranks: list[int] = []
        self._top_ids: list[int] = []
        self._top: list[float] = []

    def __len__(self) -> int:
        return len(self._chosen)

    def feed(self, told: PromptLogprobs) -> None:
        """What was told before is told again after a crash or a preemption."""
        at = told.first - 1
        if at > len(self._chosen):
            raise RuntimeError(f"log-probabilities of prompt tokens from {len(self._chosen) + 1} to {told.first} are missing")
        k = self._num_told = told.num_top
        self._chosen[at:] = told.chosen
        self._ranks[at:] = told.ranks
        self._top_ids[at * k :] = told.top_ids
        self._top[at * k :] = told.top

    def tokens(self) -> Iterator[tuple[float, int, Sequence[int], Sequence[float]]]:
        """Of each token after the prompt's first: its log-probability, its rank, ids and log-probabilities of the likeliest."""
        k, wanted = self._num_told, min(self._num_told, self.num_top)
        for at, (chosen, rank) in enumerate(zip(self._chosen, self._ranks, strict=True)):
            yield chosen, rank, self._top_ids[at * k : at * k + wanted], self._top[at * k : at * k + wanted]
