"""What a request wants of its outputs beside their text: how many, which log-probabilities, and what bends the choice of tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

from msgspec import Struct, structs

from daemon.api.decode import invalid
from daemon.api.token_limits import checked_words
from daemon.contracts import ModelEntry
from daemon.errors import BadRequest
from engine.protocol import SamplingParams

MAX_N = 128
MAX_TOP_LOGPROBS = 20
MAX_BIASED_TOKENS = 1024


class Outputs(Struct, array_like=True, frozen=True):
    """None where a model's own default may step in."""

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float | None = None
    min_p: float | None = None
    logit_bias: dict[int, float] = {}
    logprobs: int = -1  # alternatives to each token; -1: no log-probabilities
    echo: bool = False
    allowed_token_ids: list[int] = []  # empty: all
    bad_words: list[str] = []
    prompt_logprobs: int = -1  # as logprobs

    @property
    def echoed_logprobs(self) -> int:
        """Alternatives to each token of an echoed prompt; -1: no log-probabilities of it."""
        return self.logprobs if self.echo else -1


def outputs_of(fields: Any, chat: bool) -> Outputs:
    """fields: a ChatBody or CompletionBody. Raises BadRequest naming the field."""
    n = fields.n or 1
    if fields.best_of and fields.best_of != n:
        raise BadRequest(
            "unsupported_parameter", f"best_of: only the value of n ({n}) is supported by this server", param="best_of"
        )
    if fields.prompt_logprobs is not None and fields.stream:
        raise BadRequest("unsupported_parameter", "prompt_logprobs is not available with stream: true", param="prompt_logprobs")
    return Outputs(
        n=n,
        presence_penalty=fields.presence_penalty or 0.0,
        frequency_penalty=fields.frequency_penalty or 0.0,
        repetition_penalty=fields.repetition_penalty,
        min_p=fields.min_p,
        logit_bias=_logit_bias(fields.logit_bias or {}),
        logprobs=_chat_logprobs(fields) if chat else _completion_logprobs(fields),
        echo=not chat and bool(fields.echo),
        allowed_token_ids=fields.allowed_token_ids or [],
        bad_words=checked_words(fields.bad_words or []),
        prompt_logprobs=-1 if fields.prompt_logprobs is None else fields.prompt_logprobs,
    )


def _chat_logprobs(fields: Any) -> int:
    if fields.logprobs:
        return int(fields.top_logprobs or 0)
    if fields.top_logprobs:
        raise invalid("top_logprobs", "top_logprobs is only allowed with logprobs: true")
    return -1


def _completion_logprobs(fields: Any) -> int:
    if fields.logprobs is True:
        raise invalid("logprobs", f"logprobs must be a number of alternatives from 0 to {MAX_TOP_LOGPROBS}")
    return -1 if fields.logprobs is None or fields.logprobs is False else int(fields.logprobs)


def _logit_bias(given: dict[str, float]) -> dict[int, float]:
    bias = {}
    for key, value in given.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise invalid("logit_bias", f"logit_bias: {key[:32]!r} is no token id")
        bias[int(key)] = value
    return bias


def check_ids(field: str, token_ids: Iterable[int], model: ModelEntry) -> None:
    """Raises BadRequest naming the first id that the model does not have."""
    for token_id in token_ids:
        if token_id >= model.vocab_size:
            raise invalid(field, f"{field}: {token_id} is outside the vocabulary of {model.vocab_size} tokens")


def check_n(n: int, num_prompts: int, model: ModelEntry) -> None:
    """Sequences of one request run together; a model runs max_sequences at a time."""
    if n > 1 and n * num_prompts > model.max_sequences:
        prompts = f" for {num_prompts} prompts" if num_prompts > 1 else ""
        raise invalid(
            "n", f"n: {n}{prompts} makes {n * num_prompts} sequences, more than max_sequences {model.max_sequences} of {model.name}"
        )


def nth(params: SamplingParams, number: int, echoed_logprobs: int = -1) -> SamplingParams:
    """The settings of one of n sequences: the first has the request's seed, the others seeds that follow from it. They tell of the
    prompt's tokens only what they show themselves, its log-probabilities if it is echoed."""
    if number == 0:
        return params
    digest = hashlib.blake2b(f"{params.seed}/{number}".encode(), digest_size=8).digest()
    seed = int.from_bytes(digest, "little") >> 1
    return structs.replace(params, seed=seed, prompt_logprobs=echoed_logprobs, prompt_ranks=False)
