"""The request fields that chats, completions and responses share, and `Head`, the part of a parsed body that the daemon itself
needs.

A body is parsed into two parts: the small one (`Head`, all fields but the prompt) and the prompt as msgpack, which only the text
worker decodes. A body of at most body_parts.INLINE_BYTES is parsed on the event loop, where the slowest kind (128 KiB of token ids)
takes 2 ms; a longer one is parsed in a text worker.
"""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Raw, Struct

from daemon.api.bodies.decode import check_text, invalid
from daemon.api.bodies.outputs import MAX_BIASED_TOKENS, MAX_N, MAX_TOP_LOGPROBS, Outputs, outputs_of
from daemon.api.bodies.prompts import KeepLast, TokenId, checked_keep_last
from daemon.api.bodies.response_format import grammar_of
from daemon.api.bodies.token_limits import MAX_ALLOWED_TOKENS, MAX_BAD_WORDS
from daemon.api.bodies.tools import ToolRequest
from daemon.api.bodies.unsupported import UnsupportedFields

MAX_STOPS = 16

Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]
NumSequences = Annotated[int, Meta(ge=1, le=MAX_N)]
NumTop = Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Bias = Annotated[float, Meta(ge=-100, le=100)]


class StreamOptions(Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Sampling(UnsupportedFields):
    """The request fields that chats, completions and responses have in common. The allowed ranges are part of the types, so that
    the decoder checks them and its errors name the field."""

    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    min_tokens: Count | None = None
    ignore_eos: bool | None = None
    stop: str | list[str] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=1024)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=100)] | None = None
    logit_bias: Annotated[dict[str, Bias], Meta(max_length=MAX_BIASED_TOKENS)] | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None


SAMPLING_MEANINGS = {
    "temperature": "0 is greedy; default: the model's settings, then the checkpoint's, then 1",
    "top_p": "nucleus; 0: the likeliest token",
    "top_k": "-1 and 0: all",
    "min_p": "of the likeliest token's probability",
    "seed": "the same seed, prompt and settings give the same text",
    "min_tokens": "before that no end token counts",
    "ignore_eos": "goes on after end tokens",
    "stop": "up to 16 strings; the text ends before them",
    "stop_token_ids": "tokens that end the text",
    "presence_penalty": "taken off once for each token that is there",
    "frequency_penalty": "taken off for each time it is there",
    "repetition_penalty": "divides the score of tokens that are there; 1: none",
    "logit_bias": "token id to bias",
    "cache_salt": "only requests with the same salt, of the same tenant, share cached prefixes",
    "priority": "where KV runs short, sequences of lower priority give way first; default: the tenant's (keys.md), else 0",
}


class Common(Sampling):
    """The request fields that chats and completions share, beyond those that responses have as well (Sampling)."""

    model: str | None = None
    max_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    max_completion_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    truncate_prompt_tokens: KeepLast | None = None
    n: NumSequences | None = None
    best_of: Annotated[int, Meta(ge=0, le=MAX_N)] | None = None  # OpenAI's specification allows 0
    allowed_token_ids: Annotated[list[TokenId], Meta(min_length=1, max_length=MAX_ALLOWED_TOKENS)] | None = None
    bad_words: Annotated[list[str], Meta(max_length=MAX_BAD_WORDS)] | None = None
    prompt_logprobs: NumTop | None = None
    # see response_format.py
    response_format: Raw = Raw()
    regex: Raw = Raw()
    grammar: Raw = Raw()
    guided_json: Raw = Raw()
    guided_regex: Raw = Raw()
    guided_grammar: Raw = Raw()
    guided_choice: Raw = Raw()
    structured_outputs: Raw = Raw()


MEANINGS = {
    "model": "name or alias; below `/m/MODEL` it may be left out",
    "max_tokens": "default: what the context leaves",
    "max_completion_tokens": "the same",
    "stream": "server-sent events",
    "stream_options": "include_usage: a last chunk with the usage; continuous_usage_stats: usage in each chunk. Where a model was "
    "paused to make room, usage has an object `hearth` too: preemptions, restored_tokens, recomputed_tokens",
    "user": "read and not used",
    "truncate_prompt_tokens": "so many tokens of the prompt are kept: the special ones, and its last ones; -1: as many as fit",
    "n": "answers per prompt",
    "best_of": "must equal n; 0: not asked for",
    "allowed_token_ids": "no other tokens come, end tokens neither",
    "bad_words": "up to 256 texts of up to 128 characters; their tokens do not come one after the other",
    "prompt_logprobs": "log-probabilities of the prompt's tokens, with that many alternatives; not in streams",
    "response_format": "text, json_object, or json_schema: the answer follows it",
    "regex": "the answer matches it",
    "grammar": "the answer follows it (Lark)",
    "guided_json": "vLLM's name for a schema",
    "guided_regex": "vLLM's name for regex",
    "guided_grammar": "vLLM's name for grammar",
    "guided_choice": "one of these texts",
    "structured_outputs": "vLLM's newer name for them: json, regex, grammar or choice",
}


class Head(Struct, array_like=True):
    """The part of a parsed body that the daemon itself needs: all checked fields but the prompt. A field that may be None is None
    if the request leaves it out."""

    model: str | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    seed: int | None
    max_tokens: int | None
    min_tokens: int
    ignore_eos: bool
    stop: list[str]
    stop_token_ids: list[int]
    stream: bool
    include_usage: bool
    continuous_usage: bool
    priority: int | None  # None: the tenant's priority
    prompt_kind: str  # messages | text | ids
    num_prompts: int
    # chat: EncodeChat's options; history_calls: whether messages hold calls or results; next_call: the number of the reply's first
    # call in dialects that count a conversation's calls · completions: add_special_tokens
    options: dict[str, Any]
    tools: ToolRequest | None = None
    grammar_field: str = ""
    grammar: str = ""  # in the form of SamplingParams.grammar
    cache_salt: str = ""
    keep_last: int = 0  # truncate_prompt_tokens; 0: all
    outputs: Outputs = Outputs()
    keep_alive_s: float | None = None  # how long the model may stay in memory afterwards; None: no change
    prediction: str = ""  # text that the reply is expected to repeat


def head_of(
    fields: Common,
    *,
    max_tokens: int | None,
    prompt_kind: str,
    num_prompts: int,
    options: dict[str, Any],
    logprobs: int,
    echo: bool = False,
    tools: ToolRequest | None = None,
) -> Head:
    """Checks the fields that chats and completions share, and returns the body's Head. max_tokens: the most tokens of the reply;
    None: the request sets no limit. prompt_kind: the kind of the prompt, as in Head. num_prompts: how many prompts there are.
    options: the options for the text worker. logprobs: the number of alternatives to each token, -1 for no log-probabilities. echo:
    whether the answer begins with the prompt. tools: the facts about the request's tools, if it has any. Raises BadRequest naming
    the field."""
    if fields.model is not None:
        check_text(fields.model, "model")
    min_tokens = fields.min_tokens or 0
    if max_tokens is not None and min_tokens > max_tokens:
        raise invalid("min_tokens", f"min_tokens ({min_tokens}) is more than max_tokens ({max_tokens})")
    grammar_field, grammar = grammar_of(fields)
    outputs = outputs_of(fields, logprobs, echo)
    if max_tokens == 0 and not outputs.echo:
        raise invalid("max_tokens", "max_tokens: 0 is only allowed with echo: true")
    stream_options = fields.stream_options or StreamOptions()
    if fields.stream_options is not None and not fields.stream:
        raise invalid("stream_options", "stream_options is only allowed with stream: true")
    return Head(
        model=fields.model,
        temperature=fields.temperature,
        top_p=fields.top_p,
        top_k=fields.top_k,
        seed=fields.seed,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        ignore_eos=bool(fields.ignore_eos),
        stop=checked_stops([fields.stop] if isinstance(fields.stop, str) else fields.stop or []),
        stop_token_ids=fields.stop_token_ids or [],
        stream=bool(fields.stream),
        include_usage=bool(stream_options.include_usage),
        continuous_usage=bool(stream_options.continuous_usage_stats),
        priority=fields.priority,
        prompt_kind=prompt_kind,
        num_prompts=num_prompts,
        options=options,
        tools=tools,
        grammar_field=grammar_field,
        grammar=grammar,
        cache_salt=fields.cache_salt or "",
        keep_last=checked_keep_last(fields.truncate_prompt_tokens),
        outputs=outputs,
    )


def checked_stops(stops: list[str], field: str = "stop") -> list[str]:
    """Returns `stops` unchanged. Raises BadRequest if there are more than 16 of them, or if one is empty or longer than 1,024
    characters. field: the body's field, for the error."""
    if len(stops) > MAX_STOPS:
        raise invalid(field, f"{field}: {len(stops)} strings are more than the {MAX_STOPS} one request may name")
    for each in stops:
        if not each:
            raise invalid(field, f"{field}: a stop string is empty")
        if len(each) > 1024:
            raise invalid(field, f"{field}: a stop string is longer than 1024 characters")
    return stops
