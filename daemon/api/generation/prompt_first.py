"""A sink in front of another: a prompt that is shown with its log-probabilities is read and rendered a piece at a time.

Of a long prompt that takes a good part of a second, which the other streams of the loop must not wait for. It is done when the
first token comes, for only then are all of the prompt's log-probabilities known; tokens that come meanwhile are held.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from daemon.api.generation.logprobs import render_more
from daemon.contracts import TokenSink
from daemon.errors import HearthError, ServerFault
from daemon.streams.annotated_text import AnnotatedText, LogprobTrail
from daemon.streams.stream import Text

log = logging.getLogger("hearthd.api")
NUMBERS_AT_ONCE = 512  # log-probabilities between two turns of the event loop: about a millisecond


def prompt_first(sink: TokenSink, text: Text) -> TokenSink:
    """`sink` itself where no prompt is shown, or nothing is told of its tokens."""
    if isinstance(text, AnnotatedText) and text.trail is not None and text.has_prompt:
        return PromptFirst(sink, text, text.trail)
    return sink


class PromptFirst:
    """TokenSink."""

    def __init__(self, sink: TokenSink, text: AnnotatedText, trail: LogprobTrail) -> None:
        self._sink, self._text, self._trail = sink, text, trail
        self._num_tokens = 1 + NUMBERS_AT_ONCE // (1 + trail.num_top)  # of a piece
        self._held: list[tuple[Sequence[int], int]] = []
        self._ready = self._over = False

    def tokens(self, ids: Sequence[int], finish: int) -> None:
        if self._ready:
            self._sink.tokens(ids, finish)
            return
        self._held.append((ids, finish))
        if len(self._held) == 1:
            self._piece()

    def _piece(self) -> None:
        if self._over:
            return
        try:
            self._ready = self._text.show_some(self._num_tokens)
            render_more(self._trail)
            if not self._ready:
                asyncio.get_running_loop().call_soon(self._piece)
                return
            held, self._held = self._held, []
            for ids, finish in held:
                self._sink.tokens(ids, finish)
        except Exception:  # nobody else sees it where the loop called
            log.exception("the log-probabilities of a prompt could not be told")
            self.failed(ServerFault("internal_error", "the log-probabilities of the prompt could not be told"))

    def failed(self, error: HearthError) -> None:
        self._over = True
        self._sink.failed(error)
