"""Checks whether llguidance can follow a grammar. It runs in a text worker that serves only grammars, so that a hostile grammar can
kill no other process.

The kernel kills a worker that takes more CPU time than its limit, and the request is refused (daemon/text/deaths.py).
"""

from __future__ import annotations

import functools
import signal

from llguidance import LLMatcher, LLTokenizer

from daemon.errors import BadRequest
from daemon.text.jobs import GRAMMAR_CPU_S
from engine.grammar.compile import compile_grammar, parser_limits
from engine.grammar.refusals import plain


def check_grammar(field: str, grammar: str) -> None:
    """Raises BadRequest with the reason if the grammar cannot be followed. field: the request's field that holds the grammar. A
    Lark grammar that names special tokens is not checked here, but only by the engine, which knows the vocabulary."""
    signal.setitimer(signal.ITIMER_PROF, GRAMMAR_CPU_S)  # when it expires, its signal ends the process
    try:
        reason = why_not(grammar)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    if reason:
        raise BadRequest("unsupported_grammar", f"{field}: {reason[:500].strip()}", param=field)


@functools.cache
def _bytes_tokenizer() -> LLTokenizer:
    return LLTokenizer("byte")


def why_not(grammar: str) -> str:
    """Returns the reason why a grammar cannot be followed, as a sentence that the grammar's author understands; "" if it can be
    followed."""
    reason = _refusal(grammar)
    return plain(reason, grammar) if reason else ""


def _refusal(grammar: str) -> str:
    """Returns the reason why a grammar cannot be followed, as llguidance words it; "" if it can be followed."""
    try:
        compiled = compile_grammar(grammar)
    except ValueError as error:
        return str(error)
    failed, messages = LLMatcher.validate_grammar_with_warnings(compiled, None, limits=parser_limits())
    if failed:
        return messages[0]
    if messages:
        return ""
    # the first mask makes llguidance build the rest of the parser; the tokens are single bytes, which all vocabularies have
    matcher = LLMatcher(_bytes_tokenizer(), compiled, log_level=0, limits=parser_limits())
    if not matcher.is_error():
        mask = matcher.compute_bitmask()
        if not matcher.is_error() and not matcher.is_accepting() and mask.count(0) == len(mask):
            return "no text follows it"
    return matcher.get_error()
