"""Makes SamplingParams from a request's fields and a model's defaults, with max_tokens limited by the context length."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from msgspec import structs

from daemon.api.bodies.common import Head
from daemon.api.bodies.decode import invalid
from daemon.api.bodies.prompts import MAX_PROMPTS
from daemon.api.generation.answer_format import AnswerFormat
from daemon.errors import BadRequest
from daemon.models.entry import ModelEntry
from engine.protocol import SamplingParams


def max_tokens_for(head: Head, model: ModelEntry, form: AnswerFormat, prompt_tokens: int) -> int:
    """Returns the most tokens that a sequence may generate: the request's limit or, without one, the model's or the endpoint's
    default, at most what the context leaves. prompt_tokens: the length of its prompt. Raises BadRequest (context_length_exceeded),
    whose message contains the numbers, if the prompt or the request's limit is too large."""
    left = model.max_model_len - prompt_tokens
    prompt_field = form.prompt_field
    # agents know by Anthropic's "prompt is too long: … tokens > … maximum" and OpenAI's "this model's maximum context length is …
    # tokens" that they have to shorten the conversation
    limit = f"this model's maximum context length is {model.max_model_len} tokens (max_model_len of {model.name})"
    if left < 1:
        raise BadRequest(
            "context_length_exceeded",
            f"{prompt_field}: the prompt is too long: {prompt_tokens} tokens > {model.max_model_len - 1} maximum; {limit}, "
            "and an answer takes at least one",
            param=prompt_field,
        )
    if head.max_tokens is not None:
        if head.max_tokens > left and not form.bounds_max_tokens:
            raise BadRequest(
                "context_length_exceeded",
                f"{prompt_field}: {prompt_tokens} prompt tokens + max_tokens {head.max_tokens} = "
                f"{prompt_tokens + head.max_tokens}, and {limit}",
                param=prompt_field,
            )
        return min(head.max_tokens, left)
    default = model.generation_defaults.get("max_tokens")
    if default is None:
        default = left if form.default_max_tokens is None else form.default_max_tokens
    return max(1, min(int(default), left))


def sampling_params(
    head: Head, model: ModelEntry, form: AnswerFormat, prompt_tokens: int, bad_words: list[list[int]], seed: int
) -> SamplingParams:
    """Returns the sampling settings of a prompt's first sequence. prompt_tokens: the length of the prompt. bad_words: the token ids
    from bad_word_ids. seed: used if the request has no seed. Raises BadRequest naming the field."""
    max_tokens = max_tokens_for(head, model, form, prompt_tokens)
    if head.min_tokens > max_tokens:
        raise BadRequest(
            "invalid_request", f"min_tokens ({head.min_tokens}) is more than max_tokens ({max_tokens})", param="min_tokens"
        )
    outputs = head.outputs
    check_ids("stop_token_ids", head.stop_token_ids, model)
    check_ids("logit_bias", outputs.logit_bias, model)
    check_ids("allowed_token_ids", outputs.allowed_token_ids, model)
    defaults = model.generation_defaults
    top_k = int(head.top_k if head.top_k is not None else defaults.get("top_k", 0))
    repetition = outputs.repetition_penalty if outputs.repetition_penalty is not None else defaults.get("repetition_penalty", 1.0)
    temperature = float(head.temperature if head.temperature is not None else defaults.get("temperature", 1.0))
    top_p = float(head.top_p if head.top_p is not None else defaults.get("top_p", 1.0))
    if top_p == 0:  # top_p 0 is within OpenAI's range: then only the likeliest token is left
        temperature, top_p = 0.0, 1.0
    nothing = max_tokens == 0  # only the prompt is wanted; the engine generates a token even so, and nothing may prevent that
    return SamplingParams(
        max_tokens=max(1, max_tokens),
        temperature=temperature,
        top_p=top_p,
        top_k=max(0, top_k),  # clients write "off" as 0 or -1
        seed=head.seed if head.seed is not None else seed,
        min_tokens=head.min_tokens,
        ignore_eos=head.ignore_eos or nothing,
        stop_token_ids=[] if nothing else head.stop_token_ids,
        grammar="" if nothing else head.grammar,
        logprobs=outputs.logprobs,
        prompt_logprobs=max(outputs.prompt_logprobs, outputs.echoed_logprobs),
        prompt_ranks=outputs.prompt_logprobs >= 0,
        min_p=float(outputs.min_p if outputs.min_p is not None else defaults.get("min_p", 0.0)),
        presence_penalty=outputs.presence_penalty,
        frequency_penalty=outputs.frequency_penalty,
        repetition_penalty=float(repetition),
        logit_bias=outputs.logit_bias,
        allowed_token_ids=[] if nothing else outputs.allowed_token_ids,
        bad_words=[] if nothing else bad_words,
    )


def check_ids(field: str, token_ids: Iterable[int], model: ModelEntry) -> None:
    """Raises BadRequest naming the first of the token ids that is outside the model's vocabulary. field: the request's field that
    holds them."""
    for token_id in token_ids:
        if token_id >= model.vocab_size:
            raise invalid(field, f"{field}: {token_id} is outside the vocabulary of {model.vocab_size} tokens")


def check_n(n: int, num_prompts: int, model: ModelEntry) -> None:
    """Raises BadRequest if a request has more sequences than allowed. n: the sequences for each prompt. The limit is MAX_PROMPTS,
    or the number that the model runs at once if that is larger."""
    most = max(MAX_PROMPTS, model.max_sequences)
    if n * num_prompts > most:
        prompts = f" for {num_prompts} prompts" if num_prompts > 1 else ""
        raise invalid("n", f"n: {n}{prompts} makes {n * num_prompts} sequences, more than the {most} that one request may have")


def nth(params: SamplingParams, number: int, echoed_logprobs: int = -1) -> SamplingParams:
    """Returns the sampling settings of one of the n sequences of a prompt. params: the settings of the first sequence. number: the
    sequence's index. A later sequence has a seed derived from that of the first, and reports log-probabilities of the prompt only
    if the prompt is echoed. echoed_logprobs: the number of alternatives to each echoed token, -1 for none."""
    if number == 0:
        return params
    digest = hashlib.blake2b(f"{params.seed}/{number}".encode(), digest_size=8).digest()
    seed = int.from_bytes(digest, "little") >> 1
    return structs.replace(params, seed=seed, prompt_logprobs=echoed_logprobs, prompt_ranks=False)
