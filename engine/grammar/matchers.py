"""The matchers of one model's requests: each holds a place in its grammar and writes the mask of the tokens that may follow.

All times are llguidance's: a mask takes a few µs in the middle of a string and up to 15 ms where it meets a new state; a grammar is
built in 1 ms, a hostile one in up to a second, and the tokenizer's trie in 0.2 s (32,000 entries) to 1 s (128,000).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from llguidance import LLMatcher, LLTokenizer

from engine.grammar.compile import compile_grammar, parser_limits
from engine.grammar.messages import row_bytes
from engine.grammar.refusals import plain

log = logging.getLogger("grammar")


class GrammarError(Exception):
    """The grammar cannot be followed (any further): why, for whoever wrote it."""


@dataclass(slots=True)
class Matcher:
    row: int
    state: LLMatcher
    grammar: str


class Matchers:
    """masks: memory of num_rows rows of `row_bytes(vocab_size)`, at `address`. Bit i of a row: token i may come.

    `start` may run in a thread beside the other methods.
    """

    def __init__(self, folder: str, vocab_size: int, eos_token_ids: list[int], masks: memoryview, address: int) -> None:
        """Raises GrammarError for a tokenizer that llguidance cannot read."""
        file = Path(folder) / "tokenizer.json"
        if not eos_token_ids:
            raise GrammarError("a grammar's end needs an end id, and the model has none")
        try:
            # the text, not the path: a path that is not there would be looked for on the network
            self._tokenizer = LLTokenizer(file.read_text(), n_vocab=vocab_size, eos_token=eos_token_ids)
        except Exception as error:  # the library raises bare Exception
            log.warning("%s cannot be used for grammars: %s", file, error)
            raise GrammarError("its tokenizer.json is of a kind that grammars cannot be followed with") from None
        self._end_ids = [end for end in eos_token_ids if end < vocab_size]
        self._row_bytes = row_bytes(vocab_size)
        self._masks, self._address = masks, address
        self._matchers: dict[int, Matcher] = {}

    def start(self, row: int, grammar: str, output: list[int]) -> tuple[Matcher, bool]:
        """(the matcher after `output`, whether its text is complete); its mask is written unless it is. Raises GrammarError."""
        try:
            compiled = compile_grammar(grammar)
        except ValueError as error:
            raise GrammarError(plain(str(error), grammar)) from None
        matcher = Matcher(row, LLMatcher(self._tokenizer, compiled, log_level=0, limits=parser_limits()), grammar)
        self._check(matcher)
        if output and not matcher.state.consume_tokens(output):
            self._check(matcher)
        return matcher, self._ended(matcher)

    def add(self, key: int, matcher: Matcher) -> None:
        self._matchers[key] = matcher

    def advance(self, key: int, token: int) -> bool | None:
        """Whether its text is complete; its mask is written unless it is. None for an unknown key. Raises GrammarError."""
        matcher = self._matchers.get(key)
        if matcher is None:
            return None
        matcher.state.consume_token(token)
        return self._ended(matcher)

    def forget(self, key: int) -> None:
        self._matchers.pop(key, None)

    def _ended(self, matcher: Matcher) -> bool:
        """Writes the mask; True if nothing may follow but an end id."""
        state = matcher.state
        self._check(matcher)
        if state.is_stopped():
            return True
        start = matcher.row * self._row_bytes
        state.unsafe_compute_mask_ptr(self._address + start, self._row_bytes)
        self._check(matcher)
        row = bytearray(self._masks[start : start + self._row_bytes])
        for end in self._end_ids:
            row[end >> 3] &= ~(1 << (end & 7)) & 0xFF
        if row.count(0) < len(row):
            return False
        if not state.is_accepting():
            raise GrammarError("no token of this model's vocabulary can follow")
        return True

    @staticmethod
    def _check(matcher: Matcher) -> None:
        if matcher.state.is_error():
            raise GrammarError(plain(matcher.state.get_error() or "", matcher.grammar))
