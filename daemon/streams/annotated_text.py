"""The text of a sequence whose client wants more than the generated text: the prompt before it (echo) or each token's
log-probability.

Sequences without these options do not use this module. The log-probabilities of a step's tokens are given to LogprobTrail.feed just
before the tokens are added to the text.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from daemon.streams.prompt_trail import PromptTrail
from daemon.streams.stream import Text
from daemon.text.detokenizer import Detokenizer, detokenizer
from daemon.text.header_tokens import HeaderTokens
from daemon.text.token_table import TokenTable
from engine.protocol import FINISH_STOP, PromptLogprobs


@dataclass(slots=True)
class TokenEntry:
    """A token in the form in which clients see it. text: the token's part of the text of the choice; the texts of all entries,
    joined, are that text. A character made of several tokens is in the entry of the last of them. offset: the index in the choice's
    text at which `text` begins, in characters. raw: the token's own bytes. logprob: the token's log-probability; None for the first
    token of a prompt. top_ids, top: ids and log-probabilities of the most likely tokens in its place."""

    token_id: int
    text: str
    raw: bytes
    logprob: float | None
    top_ids: Sequence[int] = ()
    top: Sequence[float] = ()
    offset: int = 0


class Rendering(Protocol):
    """Renders token entries as JSON, a few at a time."""

    def __len__(self) -> int: ...

    def add(self, entries: Sequence[TokenEntry]) -> None: ...

    def json(self) -> bytes: ...


class LogprobTrail:
    """Holds back the tokens of one sequence, with their log-probabilities, until their text may be sent. keep_end: whether the
    token that ends the sequence is released, too, with an empty text."""

    def __init__(self, table: TokenTable, end_ids: frozenset[int], num_top: int, keep_end: bool) -> None:
        """table: the tokens' bytes. end_ids: tokens that end a sequence. num_top: the number of alternatives that are wanted for
        each token."""
        self.table, self.num_top = table, num_top
        self.rendering: Rendering | None = None  # entries rendered ahead of the next frame; None: there are none
        self._end_ids, self._keep_end = end_ids, keep_end
        self._detokenizer: Detokenizer = detokenizer(table)
        self.fed: list[tuple[float, Sequence[int], Sequence[float]]] = []  # all tokens' log-probabilities: arguments of `feed`
        self._num_used = 0  # how many of these have been used
        self._prompt = PromptTrail(num_top)
        self._queue: deque[TokenEntry] = deque()  # held-back tokens: a possible stop string or an unfinished character
        self._open: list[TokenEntry] = []  # the last ones in the queue, whose text is not known yet
        self._out: list[TokenEntry] = []
        self._begun = False
        self._offset = self._sent = 0  # characters before the queue, characters sent

    # ---- from the engine

    def feed(self, chosen: float, top_ids: Sequence[int], top: Sequence[float]) -> None:
        """Takes the log-probability of the next generated token, and the ids and log-probabilities of the most likely tokens in its
        place."""
        self.fed.append((chosen, top_ids, top))

    def feed_prompt(self, told: PromptLogprobs) -> None:
        """Takes log-probabilities of the prompt's tokens from the engine; they may come in several parts."""
        self._prompt.feed(told)

    # ---- called as text is produced

    def begin(self, prompt: Sequence[int], first: int, end: int) -> None:
        """Adds the prompt's tokens with indices from `first` up to, not including, `end`. Called for consecutive pieces of the
        prompt; after the last piece `begun` is called. Raises RuntimeError if log-probabilities of prompt tokens are missing."""
        if len(self._prompt) != len(prompt) - 1:
            raise RuntimeError(f"log-probabilities of {len(self._prompt)} prompt tokens are there, of {len(prompt)} tokens in all")
        for at in range(first, end):
            if at == 0:
                self._append(TokenEntry(prompt[0], "", b"", None))
            else:
                self._append(TokenEntry(prompt[at], "", b"", *self._prompt[at - 1]))
        self._release_all(len(self._open))

    def begun(self, num_chars: int) -> None:
        """Allows the entries of the prompt to be sent, after all its tokens were added. num_chars: the length of the prompt's
        text."""
        self._open.clear()
        self._prompt = PromptTrail(self.num_top)  # frees its memory
        self._release_all(0)
        self._offset = self._sent = num_chars

    def _release_all(self, but: int) -> None:
        while len(self._queue) > but:
            entry = self._queue.popleft()
            entry.offset = self._offset
            self._offset += len(entry.text)
            self._out.append(entry)

    def add(self, ids: Sequence[int], finish: int) -> None:
        for at, token_id in enumerate(ids):
            told = self._use()
            if finish == FINISH_STOP and at == len(ids) - 1 and token_id in self._end_ids:
                if self._keep_end:
                    self._queue.append(TokenEntry(token_id, "", b"", *told))
                break
            self._append(TokenEntry(token_id, "", b"", *told))
        if finish:
            rest = self._detokenizer.end()
            if self._open:
                self._open[-1].text += rest
            elif rest and self._out:  # the prompt ended in the middle of a character
                self._out[-1].text += rest
                self._offset += len(rest)
            self._open.clear()

    def skip(self, num_tokens: int) -> None:
        """Drops the log-probabilities of the next `num_tokens` generated tokens, which the client does not want."""
        for _ in range(num_tokens):
            self._use()

    def _use(self) -> tuple[float, Sequence[int], Sequence[float]]:
        told = self.fed[self._num_used]
        self._num_used += 1
        return told

    def release(self, num_chars: int, matched: bool) -> None:
        """Allows the entries of the next num_chars characters of text to be sent. matched: whether a stop string was found, so that
        the text after these characters is dropped."""
        self._sent += num_chars
        while len(self._queue) > len(self._open) and self._offset + len(self._queue[0].text) <= self._sent:
            entry = self._queue.popleft()
            entry.offset = self._offset
            self._offset += len(entry.text)
            self._out.append(entry)
        if matched:
            if self._queue and self._offset < self._sent:  # the stop string begins inside this token's text
                entry = self._queue[0]
                entry.text = entry.text[: self._sent - self._offset]
                entry.raw, entry.offset = entry.text.encode(), self._offset
                self._out.append(entry)
            self._queue.clear()
            self._open.clear()

    def take(self, but: int = 0) -> list[TokenEntry]:
        """Returns the entries that may be sent and were not returned before. The last `but` of them are kept for a later call."""
        end = max(0, len(self._out) - but)
        out, self._out = self._out[:end], self._out[end:]
        return out

    def _append(self, entry: TokenEntry) -> None:
        entry.raw = self.table.raw(entry.token_id) if self._begun else self.table.raw_first(entry.token_id)
        self._begun = self._begun or bool(entry.raw)
        text = self._detokenizer.add((entry.token_id,))
        if self._open and len(text) > len(entry.raw.decode(errors="replace")):
            own = _decoded(entry.raw)
            if own is not None and text.endswith(own):  # the bytes before this token do not belong to its character
                self._open[-1].text += text[: len(text) - len(own)]
                text = own
        entry.text = text
        self._queue.append(entry)
        if self._detokenizer.as_in_table:
            self._open.clear()
        else:
            self._open.append(entry)


class AnnotatedText(Text):
    """The text of a sequence with log-probabilities, with an echo of its prompt, or with both.

    trail: takes the log-probabilities; None if the client wants none. echo: None if the client wants no echo; otherwise the
    prompt's tokens, and the prompt's text or, if the prompt was given as tokens, None. drop_tokens: whether the client wants no
    completion (max_tokens 0), although the engine generates one token."""

    __slots__ = ("_drop_tokens", "_echo", "_shown", "_shown_tokens", "trail")

    def __init__(
        self,
        table: TokenTable,
        end_ids: frozenset[int],
        stops: Sequence[str],
        min_tokens: int,
        trail: LogprobTrail | None,
        echo: tuple[Sequence[int], str | None] | None,
        drop_tokens: bool,
        headers: HeaderTokens | None = None,
    ) -> None:
        super().__init__(table, end_ids, stops, min_tokens, headers)
        self.trail, self._echo, self._drop_tokens = trail, echo, drop_tokens
        self._shown: list[str] = []  # the prompt's text so far, in parts
        self._shown_tokens = 0

    @property
    def as_in_table(self) -> bool:
        return False

    def add(self, ids: Sequence[int], finish: int) -> str:
        shown = self._show_prompt() if self._echo is not None else ""
        if self._drop_tokens:
            if self.trail is not None:
                self.trail.skip(len(ids))
            ids = ()
        if self.trail is None:
            return shown + super().add(ids, finish)
        self.trail.add(ids, finish)
        text = super().add(ids, finish)
        self.trail.release(len(text), self.matched)
        return shown + text

    @property
    def has_prompt(self) -> bool:
        """Returns whether the text is to begin with an echo of the prompt that `add` has not returned yet."""
        return self._echo is not None

    def show_some(self, num_tokens: int) -> bool:
        """Decodes the next num_tokens tokens of the prompt for the echo. Returns whether all tokens of the prompt are decoded.
        Called several times for a long prompt, so that no call takes long; `add` decodes all tokens that are not decoded yet."""
        assert self._echo is not None
        prompt, _ = self._echo
        first = self._shown_tokens
        self._shown_tokens = end = min(len(prompt), first + num_tokens)
        self._shown.append(self._detokenizer.add(prompt[first:end]))
        if self.trail is not None:
            self.trail.begin(prompt, first, end)
        return end == len(prompt)

    def _show_prompt(self) -> str:
        """Returns the text of the prompt for the echo, in which stop strings are not searched for."""
        assert self._echo is not None
        prompt, written = self._echo
        if self._shown_tokens < len(prompt):
            self.show_some(len(prompt))
        shown = "".join(self._shown) if written is None else written
        self._echo, self._shown = None, []
        if self.trail is not None:
            self.trail.begun(len(shown))
        return shown


def _decoded(raw: bytes) -> str | None:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return None
