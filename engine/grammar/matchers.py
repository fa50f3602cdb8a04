"""The matchers of one model's requests. A matcher follows its request's grammar token by token, and writes the masks of the tokens
that are allowed next.

llguidance takes nearly all of the time: for a mask a few µs in the middle of a string, and up to 15 ms where the grammar reaches a
new state; 1 ms to build a grammar, up to a second for a hostile one; 0.2 s (32,000 entries) to 1 s (128,000) to build a tokenizer's
trie."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from pathlib import Path

from llguidance import LLMatcher, LLTokenizer

from engine.grammar.compile import compile_grammar, parser_limits
from engine.grammar.messages import Draft, mask_number, row_bytes
from engine.grammar.refusals import plain

log = logging.getLogger("grammar")

GUESSING_S = 0.001  # time after which no more guesses are added to a draft, because their masks may be wasted work


class GrammarError(Exception):
    """Raised when a grammar cannot be followed, or not any further. The message gives the reason in words for the author of the
    grammar."""


@dataclass(slots=True)
class Matcher:
    """One request's position in its grammar. row: the request's number, below messages.Open.num_rows, by which its masks are found
    in the shared memory (mask_number). state: llguidance's matcher, after the request's tokens so far. grammar: its kind and text
    (SamplingParams.grammar)."""

    row: int
    state: LLMatcher
    grammar: str


class Matchers:
    """The matchers of one model's requests, by the keys that name requests in messages.
    masks: shared memory, which begins at `address`, with rows_each masks of `row_bytes(vocab_size)` bytes for each request
    (messages.Open). Bit i of a mask says that token i is allowed next.
    text_id: identifies the version of the tokenizer's files that is read at the beginning.

    `start` may run in a thread while other methods are called."""

    def __init__(
        self,
        folder: str,
        vocab_size: int,
        eos_token_ids: list[int],
        masks: memoryview,
        address: int,
        rows_each: int = 1,
        text_id: str = "",
    ) -> None:
        """Loads the tokenizer of the checkpoint in `folder`. Raises GrammarError if llguidance cannot read it, or if the model
        has no end id."""
        if not eos_token_ids:
            raise GrammarError("a grammar's end needs an end id, and the model has none")
        self._file, self._vocab_size, self._eos_token_ids = Path(folder) / "tokenizer.json", vocab_size, eos_token_ids
        self._tokenizer, self._text_ids = self._read(), {text_id}
        self._end_ids = [end for end in eos_token_ids if end < vocab_size]
        self._row_bytes = row_bytes(vocab_size)
        self._masks, self._address, self._rows_each = masks, address, rows_each
        self._num_rows = len(masks) // (rows_each * self._row_bytes)
        self._matchers: dict[int, Matcher] = {}

    def _read(self) -> LLTokenizer:
        try:
            # the file's text is passed, because a path that does not exist would be looked up on the network
            return LLTokenizer(self._file.read_text(), n_vocab=self._vocab_size, eos_token=self._eos_token_ids)
        except Exception as error:  # the library raises bare Exception
            log.warning("%s cannot be used for grammars: %s", self._file, error)
            raise GrammarError("its tokenizer.json is of a kind that grammars cannot be followed with") from None

    def start(self, row: int, grammar: str, output: list[int], text_id: str = "") -> tuple[Matcher, bool]:
        """Returns a matcher of this grammar, advanced by the tokens in `output` (the request's output so far), and whether the
        request's text is complete. The caller then passes the matcher to `add`. Unless the text is complete, the mask of the tokens
        allowed next is written to shared memory as mask 0 of the row `row`. text_id: identifies the version of the tokenizer's
        files; if it is new, the files are read again. Raises GrammarError if the grammar cannot be followed."""
        if text_id not in self._text_ids:  # matchers that are there keep the tokenizer that they began with
            self._tokenizer = self._read()
            self._text_ids.add(text_id)
        try:
            compiled = compile_grammar(grammar)
        except ValueError as error:
            raise GrammarError(plain(str(error), grammar)) from None
        matcher = Matcher(row, LLMatcher(self._tokenizer, compiled, log_level=0, limits=parser_limits()), grammar)
        self._check(matcher.state, matcher)
        if output and not matcher.state.consume_tokens(output):
            self._check(matcher.state, matcher)
        return matcher, self._ended(matcher.state, matcher)

    def add(self, key: int, matcher: Matcher) -> None:
        self._matchers[key] = matcher

    def advance(self, key: int, tokens: list[int]) -> bool | None:
        """Advances a request's matcher by these tokens. Returns whether the request's text is complete, or None for an unknown key.
        Unless the text is complete, the mask of the tokens allowed next is written to shared memory as the request's mask 0. Raises
        GrammarError if the grammar cannot be followed any further."""
        matcher = self._matchers.get(key)
        if matcher is None:
            return None
        matcher.state.consume_tokens(tokens)
        return self._ended(matcher.state, matcher)

    def draft(self, key: int, guesses: list[int]) -> Draft | None:
        """Returns a draft of tokens that may follow a request's tokens: tokens that the grammar forces, and `guesses` as far as the
        grammar allows them. Returns None if there are no such tokens. The mask of what may follow n drafted tokens is written as
        the request's mask n, for n from 1 on; mask 0 was written by `advance`, which must be called before."""
        matcher = self._matchers[key]
        if self._rows_each == 1 or not (guesses or matcher.state.compute_ff_tokens()):
            return None
        state = matcher.state.deep_copy()  # errors in a copy do no harm, and the states that it computes are shared
        tokens: list[int] = []
        sure: list[bool] = []
        until_s = time.monotonic() + GUESSING_S
        while len(tokens) < self._rows_each - 1:
            forced = state.compute_ff_tokens()
            agree = tokens == guesses[: len(tokens)] and len(tokens) < len(guesses) and time.monotonic() < until_s
            if not forced and not agree:
                break
            token = forced[0] if forced else guesses[len(tokens)]
            if not self._goes_on(state, matcher, token, len(tokens) + 1):
                break
            tokens.append(token)
            sure.append(bool(forced))
        return Draft(tokens, sure) if tokens else None

    def _goes_on(self, state: LLMatcher, matcher: Matcher, token: int, at: int) -> bool:
        """Advances `state`, a copy of a matcher's state, by a token, and writes the mask of the tokens that may follow as the
        request's mask number `at`. Returns False if the token must not be drafted: the grammar does not allow it, or it completes
        the text."""
        if token in self._end_ids or state.validate_tokens([token]) != 1:
            return False
        state.consume_token(token)
        try:
            return not self._ended(state, matcher, at)
        except GrammarError:  # it is reported if the token is sampled
            return False

    def forget(self, key: int) -> None:
        self._matchers.pop(key, None)

    def _ended(self, state: LLMatcher, matcher: Matcher, at: int = 0) -> bool:
        """Writes the mask of the tokens that `state` allows as the request's mask number `at`, and returns whether the text is
        complete, that is, whether only an end id may follow. No mask is written if llguidance's matcher has stopped. Raises
        GrammarError if the grammar cannot be followed any further."""
        self._check(state, matcher)
        if state.is_stopped():
            return True
        start = mask_number(matcher.row, at, self._num_rows) * self._row_bytes
        state.unsafe_compute_mask_ptr(self._address + start, self._row_bytes)
        self._check(state, matcher)
        row = bytearray(self._masks[start : start + self._row_bytes])
        for end in self._end_ids:
            row[end >> 3] &= ~(1 << (end & 7)) & 0xFF
        if row.count(0) < len(row):
            return False
        if not state.is_accepting():
            raise GrammarError("no token of this model's vocabulary can follow")
        return True

    @staticmethod
    def _check(state: LLMatcher, matcher: Matcher) -> None:
        if state.is_error():
            raise GrammarError(plain(state.get_error() or "", matcher.grammar))
