"""A sink that renders an echoed prompt with its log-probabilities piece by piece before it passes tokens on to another sink.

Rendering a long prompt takes a large part of a second, for which other streams on the event loop must not wait. The rendering
begins when the first token arrives, because the log-probabilities of the prompt are complete only then; tokens that arrive
meanwhile are held back.
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
NUMBERS_AT_ONCE = 512  # log-probabilities rendered before the event loop may do other work: about a millisecond


def prompt_first(sink: TokenSink, text: Text) -> TokenSink:
    """Returns a PromptFirst in front of `sink` if a prompt with log-probabilities is echoed, otherwise `sink` itself."""
    if isinstance(text, AnnotatedText) and text.trail is not None and text.has_prompt:
        return PromptFirst(sink, text, text.trail)
    return sink


class PromptFirst:
    """Renders a sequence's echoed prompt with its log-probabilities, then passes the tokens on to another sink."""

    def __init__(self, sink: TokenSink, text: AnnotatedText, trail: LogprobTrail) -> None:
        self._sink, self._text, self._trail = sink, text, trail
        self._num_tokens = 1 + NUMBERS_AT_ONCE // (1 + trail.num_top)  # tokens in a piece
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
        except Exception:  # the event loop is the caller, so nothing else reports it
            log.exception("the log-probabilities of a prompt could not be told")
            self.failed(ServerFault("internal_error", "the log-probabilities of the prompt could not be told"))

    def failed(self, error: HearthError) -> None:
        self._over = True
        self._sink.failed(error)
