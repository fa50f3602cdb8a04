"""The tokens that a request rules out by id (allowed_token_ids and bad_words of its SamplingParams), as masks.

Shapes: W = ceil(V / 32) words of a mask, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from engine.grammar.row_masks import clear
from engine.protocol import SamplingParams


class TokenLimits:
    """The limits of one request. bits [W] uint32: if bit i is set, token i is allowed next; not to be written to. output: tokens
    the request produced before, if it is submitted again."""

    def __init__(self, model: str, params: SamplingParams, vocab_size: int, output: Sequence[int]) -> None:
        self.model, self.params = model, params
        self._output = list(output)
        allowed = np.zeros(-(-vocab_size // 32) * 32, np.bool_)
        if params.allowed_token_ids:
            ids = np.array(params.allowed_token_ids, np.int64)
            allowed[ids[(ids >= 0) & (ids < vocab_size)]] = True
        else:
            allowed[:vocab_size] = True
        self._longer: dict[int, list[list[int]]] = {}  # bad sequences of several tokens, by their last token but one
        for sequence in params.bad_words:
            if len(sequence) > 1:
                self._longer.setdefault(sequence[-2], []).append(sequence)
            elif sequence and 0 <= sequence[0] < vocab_size:
                allowed[sequence[0]] = False
        self._always: npt.NDArray[np.uint32] = np.packbits(allowed, bitorder="little").view(np.uint32)
        self.bits = self._next()

    @property
    def num_output(self) -> int:
        return len(self._output)

    def append(self, token: int) -> None:
        """Records the next token of the request's output and updates `bits`."""
        self._output.append(token)
        self.bits = self._next()

    def why_stuck(self) -> str:
        """Returns the error message for a client whose request ends because no token is left for it."""
        params = self.params
        given = (("allowed_token_ids", params.allowed_token_ids), ("bad_words", params.bad_words), ("the grammar", params.grammar))
        names = [name for name, value in given if value]
        leave = "leave" if len(names) > 1 else "leaves"
        return f"{' and '.join(names)} {leave} no token that may follow {len(self._output)} tokens of output"

    def _next(self) -> npt.NDArray[np.uint32]:
        """Returns the mask of the tokens allowed next: it rules out those that would complete a bad sequence."""
        output = self._output
        begun = self._longer.get(output[-1], ()) if output else ()
        completing = [sequence[-1] for sequence in begun if output[1 - len(sequence) :] == sequence[:-1]]
        if not completing:
            return self._always
        bits = self._always.copy()
        clear(bits, completing)
        return bits
