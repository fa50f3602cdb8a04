"""The log-probabilities of one prompt's tokens, as its engine reports them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from engine.protocol import PromptLogprobs


class PromptTrail:
    """The log-probabilities of one prompt's tokens from the second token on, collected from the engine's reports. num_top: the
    number of alternatives that are wanted for each token; the engine may report more."""

    def __init__(self, num_top: int) -> None:
        self.num_top = num_top
        self._num_told = 0  # number of alternatives that the engine reports for each token
        self._chosen: list[float] = []
        self._ranks: list[int] = []
        self._top_ids: list[int] = []
        self._top: list[float] = []

    def __len__(self) -> int:
        return len(self._chosen)

    def feed(self, told: PromptLogprobs) -> None:
        """Adds the log-probabilities of some consecutive tokens. After a crash or a preemption the engine reports them again, and
        the new ones replace the earlier ones. Raises RuntimeError if tokens before them are missing."""
        at = told.first - 1
        if at > len(self._chosen):
            raise RuntimeError(f"log-probabilities of prompt tokens from {len(self._chosen) + 1} to {told.first} are missing")
        k = self._num_told = told.num_top
        self._chosen[at:] = told.chosen
        self._ranks[at:] = told.ranks
        self._top_ids[at * k :] = told.top_ids
        self._top[at * k :] = told.top

    def __getitem__(self, at: int) -> tuple[float, Sequence[int], Sequence[float]]:
        """Returns the log-probability of the prompt's token `at` + 1, and the ids and log-probabilities of the most likely tokens
        in its place."""
        begin = at * self._num_told
        end = begin + min(self._num_told, self.num_top)
        return self._chosen[at], self._top_ids[begin:end], self._top[begin:end]

    def tokens(self) -> Iterator[tuple[float, int, Sequence[int], Sequence[float]]]:
        """Yields for each token from the second on: its log-probability, its rank among all tokens, and the ids and
        log-probabilities of the most likely tokens in its place."""
        for at, rank in enumerate(self._ranks):
            chosen, top_ids, top = self[at]
            yield chosen, rank, top_ids, top
