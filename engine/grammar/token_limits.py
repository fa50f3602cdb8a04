"""Makes masks from a request's limits by token id: allowed_token_ids and bad_words of its SamplingParams.

Shapes: W = ceil(V / 32) words of a mask, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from engine.grammar.row_masks import clear, holds_any
from engine.protocol import SamplingParams

Bits = npt.NDArray[np.uint32]


class TokenLimits:
    """One request's limits by token id (allowed_token_ids, bad_words). bits [W] uint32: bit i says that token i is allowed next;
    must not be written to. output: tokens that the request has already produced, if it is submitted again."""

    def __init__(self, model: str, params: SamplingParams, vocab_size: int, output: Sequence[int]) -> None:
        self.model, self.params = model, params
        self._output = list(output)
        self._longest = max((len(sequence) for sequence in params.bad_words), default=1)
        allowed = np.zeros(-(-vocab_size // 32) * 32, np.bool_)
        if params.allowed_token_ids:
            ids = np.array(params.allowed_token_ids, np.int64)
            allowed[ids[(ids >= 0) & (ids < vocab_size)]] = True
        else:
            allowed[:vocab_size] = True
        self._longer: dict[int, list[list[int]]] = {}  # last token but one -> bad sequences of several tokens with it
        for sequence in params.bad_words:
            if len(sequence) > 1:
                self._longer.setdefault(sequence[-2], []).append(sequence)
            elif sequence and 0 <= sequence[0] < vocab_size:
                allowed[sequence[0]] = False
        self._always: Bits = np.packbits(allowed, bitorder="little").view(np.uint32)
        self.bits = self.behind(())

    @property
    def num_output(self) -> int:
        return len(self._output)

    def extend(self, tokens: Sequence[int]) -> None:
        """Records the next tokens of the request's output and updates `bits`."""
        self._output += tokens
        self.bits = self.behind(())

    def num_leading_on(self, tokens: Sequence[int], masks: Sequence[Bits] | None = None) -> int:
        """Returns how many of `tokens`, from the first on, may come next in the request's output. Each must be allowed, and must
        leave at least one token that may follow it. masks [len(tokens) + 1, W]: the tokens that the request's grammar allows in the
        place of each token and after the last one; None: the request has no grammar."""
        for number, token in enumerate(tokens):
            before, behind = self.behind(tokens[:number]), self.behind(tokens[: number + 1])
            if masks is not None:
                before, behind = before & masks[number], behind & masks[number + 1]
            if not holds_any(before, (token,)) or not behind.any():
                return number
        return len(tokens)

    def why_stuck(self) -> str:
        """Returns the error message for a client whose request ends because no token is left for it."""
        params = self.params
        given = (("allowed_token_ids", params.allowed_token_ids), ("bad_words", params.bad_words), ("the grammar", params.grammar))
        names = [name for name, value in given if value]
        leave = "leave" if len(names) > 1 else "leaves"
        return f"{' and '.join(names)} {leave} no token that may follow {len(self._output)} tokens of output"

    def behind(self, tokens: Sequence[int]) -> Bits:
        """Returns the mask [W] of the tokens allowed after the request's output followed by `tokens`: allowed_token_ids without
        those that would complete a sequence in bad_words. The mask must not be written to."""
        if not self._longer:
            return self._always
        output = [*self._output[-self._longest :], *tokens]
        begun = self._longer.get(output[-1], ()) if output else ()
        completing = [sequence[-1] for sequence in begun if output[1 - len(sequence) :] == sequence[:-1]]
        if not completing:
            return self._always
        bits = self._always.copy()
        clear(bits, completing)
        return bits
