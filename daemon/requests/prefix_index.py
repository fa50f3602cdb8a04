"""Remembers which replica of a model has computed which prompts, so that a request can go to a replica that has cached its prefix.

The result is a guess, because engines drop cached prefixes without notice. After a wrong guess a request costs as much as at any
other replica. Only models with several replicas are recorded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

BLOCK_TOKENS = 64  # prefixes are compared in whole blocks
MOST_BLOCKS = 32_768  # the most blocks remembered for one model: prompts of two million tokens


class PrefixIndex:
    def __init__(self) -> None:
        # model -> chained hash of a prefix -> bits of the replicas that have computed it; the least recently used first
        self._blocks: dict[str, dict[int, int]] = {}
        self._bits: dict[str, dict[str, int]] = {}  # model -> replica -> its bit

    def find(self, model: str, seed: tuple[str, ...], prompt: Sequence[int]) -> tuple[tuple[str, int], ...]:
        """Returns (replica, number of tokens) for each replica of the model that has computed a prefix of the prompt. The number is
        the length of the longest such prefix, in whole blocks. seed: the values that, besides the tokens, must be equal for a
        prefix to be shared."""
        blocks = self._blocks.get(model)
        if blocks is None:
            return ()
        left = tuple(self._bits[model].items())
        found = dict.fromkeys(self._bits[model], 0)
        for number, key in enumerate(_chain(seed, prompt), 1):
            mask = blocks.get(key, 0)
            left = tuple((replica, bit) for replica, bit in left if mask & bit)
            if not left:
                break
            for replica, _ in left:
                found[replica] = number * BLOCK_TOKENS
        return tuple((replica, num_tokens) for replica, num_tokens in found.items() if num_tokens)

    def note(self, model: str, seed: tuple[str, ...], tokens: Sequence[int], replica: str) -> None:
        """Records that a replica of the model has computed these tokens, and so has probably cached their prefixes. seed: the
        values that, besides the tokens, must be equal for a prefix to be shared."""
        blocks, bits = self._blocks.setdefault(model, {}), self._bits.setdefault(model, {})
        bit = bits.setdefault(replica, 1 << len(bits))
        for key in _chain(seed, tokens):
            blocks[key] = blocks.pop(key, 0) | bit
        while len(blocks) > MOST_BLOCKS:
            del blocks[next(iter(blocks))]

    def forget(self, replica: str) -> None:
        """Forgets all prefixes that a replica has computed, because it has left its device."""
        model = next((model for model, bits in self._bits.items() if replica in bits), None)
        if model is None:
            return
        bit = self._bits[model][replica]
        left = {key: mask & ~bit for key, mask in self._blocks[model].items() if mask & ~bit}
        if left:
            self._blocks[model] = left
        else:
            del self._blocks[model], self._bits[model]


def _chain(seed: tuple[str, ...], tokens: Sequence[int]) -> Iterator[int]:
    """Yields a hash for each prefix of the tokens that consists of whole blocks of BLOCK_TOKENS, the shortest first. seed: included
    in each hash."""
    key = hash(seed)
    for start in range(0, len(tokens) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        key = hash((key, *tokens[start : start + BLOCK_TOKENS]))
        yield key
