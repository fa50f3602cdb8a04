"""Defines a request's settings for its outputs: how many there are, log-probabilities, and limits on the sampled tokens."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from daemon.api.bodies.decode import invalid
from daemon.api.bodies.token_limits import checked_words
from daemon.errors import BadRequest

MAX_N = 128
MAX_TOP_LOGPROBS = 20
MAX_BIASED_TOKENS = 1024


class Outputs(Struct, array_like=True, frozen=True):
    """A request's settings for its answers: how many there are, penalties, log-probabilities, and limits on the sampled tokens. For
    a field that is None the model's default applies."""

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float | None = None
    min_p: float | None = None
    logit_bias: dict[int, float] = {}
    logprobs: int = -1  # number of alternatives to each token; -1: no log-probabilities
    echo: bool = False
    allowed_token_ids: list[int] = []  # empty: all tokens are allowed
    bad_words: list[str] = []
    prompt_logprobs: int = -1  # number of alternatives to each prompt token; -1: no log-probabilities

    @property
    def echoed_logprobs(self) -> int:
        """The number of alternatives to each token of an echoed prompt; -1 if no prompt is echoed, or if no log-probabilities are
        asked for."""
        return self.logprobs if self.echo else -1


def outputs_of(fields: Any, logprobs: int, echo: bool = False) -> Outputs:
    """Checks and returns a request's settings for its answers. fields: a body with Common's fields. logprobs: the number of
    alternatives to each token, -1 for no log-probabilities. echo: whether the answer begins with the prompt. Raises BadRequest
    naming the field."""
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
        logprobs=logprobs,
        echo=echo,
        allowed_token_ids=fields.allowed_token_ids or [],
        bad_words=checked_words(fields.bad_words) if fields.bad_words else [],
        prompt_logprobs=-1 if fields.prompt_logprobs is None else fields.prompt_logprobs,
    )


def _logit_bias(given: dict[str, float]) -> dict[int, float]:
    bias = {}
    for key, value in given.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise invalid("logit_bias", f"logit_bias: {key[:32]!r} is no token id")
        bias[int(key)] = value
    return bias
