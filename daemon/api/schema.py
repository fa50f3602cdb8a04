"""Bodies of chats and completions: decoding and checking.

`parse(endpoint, body)` gives two parts: the small one (a Struct, every scalar field) and the prompt as msgpack, which only the text
helper looks into. It runs on the event loop for bodies up to INLINE_BYTES and in the text helper above (measured: the costliest
128 KiB, 26,000 token ids, take 2 ms; tiny messages or parts 1 ms).
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta, Raw, Struct

from daemon.api.decode import check_text, decode, invalid
from daemon.api.messages import Message, checked_documents, content_of, hold_calls, pack_messages, packed
from daemon.api.outputs import MAX_BIASED_TOKENS, MAX_N, MAX_TOP_LOGPROBS, Outputs, outputs_of
from daemon.api.prompts import KeepLast, TokenId, checked_keep_last, prompts
from daemon.api.response_format import grammar_of
from daemon.api.token_limits import MAX_ALLOWED_TOKENS, MAX_BAD_WORDS
from daemon.api.tools import AUTO, ToolRequest, tool_request
from daemon.api.unsupported import UnsupportedFields, neutral, refuse_unsupported
from daemon.text.reasoning import CLOSE, OPEN

INLINE_BYTES = 128 << 10
MAX_STOPS = 16
MAX_SUFFIX_CHARACTERS = 4 << 20  # of all prompts together: the body has the suffix once, each prompt's tokens have it again
CHAT, COMPLETIONS = "chat", "completions"
REASONING_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")
CONTINUES_ANSWER, CONTINUES_REASONING = "answer", "reasoning"

Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]


NumSequences = Annotated[int, Meta(ge=1, le=MAX_N)]
NumTop = Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Bias = Annotated[float, Meta(ge=-100, le=100)]


class StreamOptions(Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Common(UnsupportedFields):
    """Fields of both endpoints. Ranges are part of the types, so that errors name the field."""

    model: str | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    max_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    max_completion_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    min_tokens: Count | None = None
    ignore_eos: bool | None = None
    stop: str | list[str] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=1024)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    truncate_prompt_tokens: KeepLast | None = None
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None
    n: NumSequences | None = None
    best_of: Annotated[int, Meta(ge=0, le=MAX_N)] | None = None  # OpenAI's specification allows 0
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=100)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    logit_bias: Annotated[dict[str, Bias], Meta(max_length=MAX_BIASED_TOKENS)] | None = None
    allowed_token_ids: Annotated[list[TokenId], Meta(min_length=1, max_length=MAX_ALLOWED_TOKENS)] | None = None
    bad_words: Annotated[list[str], Meta(max_length=MAX_BAD_WORDS)] | None = None
    prompt_logprobs: NumTop | None = None
    # daemon/api/response_format.py
    response_format: Raw = Raw()
    regex: Raw = Raw()
    grammar: Raw = Raw()
    guided_json: Raw = Raw()
    guided_regex: Raw = Raw()
    guided_grammar: Raw = Raw()
    guided_choice: Raw = Raw()
    structured_outputs: Raw = Raw()


class ChatBody(Common, kw_only=True):
    messages: Annotated[list[Message], Meta(min_length=1)]
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    reasoning_effort: str | None = None
    suffix: Annotated[Raw, neutral('""')] = Raw()
    chat_template_kwargs: dict[str, Any] | None = None
    documents: Raw = Raw()
    logprobs: bool | None = None
    top_logprobs: NumTop | None = None
    echo: Annotated[Raw, neutral("false")] = Raw()
    tools: Raw = Raw()
    tool_choice: Raw = Raw()
    parallel_tool_calls: bool | None = None


class CompletionBody(Common, kw_only=True):
    prompt: Raw
    add_special_tokens: bool | None = None
    max_tokens: Count | None = None  # 0: only the prompt, with echo
    logprobs: NumTop | bool | None = None
    top_logprobs: Annotated[Raw, neutral("0")] = Raw()
    echo: bool | None = None
    suffix: str | None = None
    tools: Annotated[Raw, neutral("[]")] = Raw()
    tool_choice: Annotated[Raw, neutral('"none"')] = Raw()


class Head(Struct, array_like=True):
    """The small part: what the daemon itself needs of a body."""

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
    priority: int
    prompt_kind: str  # messages | text | ids
    num_prompts: int
    # chat: EncodeChat's, and history_calls: whether messages hold calls or results · completions: add_special_tokens
    options: dict[str, Any]
    tools: ToolRequest | None = None
    grammar_field: str = ""
    grammar: str = ""  # as SamplingParams.grammar
    cache_salt: str = ""
    keep_last: int = 0  # truncate_prompt_tokens; 0: all
    outputs: Outputs = Outputs()


_decoders: dict[str, msgspec.json.Decoder[Any]] = {
    CHAT: msgspec.json.Decoder(ChatBody),
    COMPLETIONS: msgspec.json.Decoder(CompletionBody),
}


def parse(endpoint: str, body: bytes) -> tuple[Head, bytes]:
    """Raises BadRequest (400) naming the field."""
    fields: ChatBody | CompletionBody = decode(_decoders[endpoint], body, "")
    refuse_unsupported(fields)
    if isinstance(fields, ChatBody):
        tools, shown = tool_request(fields.tools, fields.tool_choice, fields.parallel_tool_calls)
        kind, prompt, num_prompts = "messages", pack_messages(fields.messages), 1
        options: dict[str, Any] = {
            "add_generation_prompt": fields.add_generation_prompt is not False and not fields.continue_final_message,
            "continue_final_message": _continues(fields),
            "kwargs": packed(_template_kwargs(fields), "chat_template_kwargs"),
            "tools": shown,
            "documents": checked_documents(bytes(fields.documents)),
            "forced": None if tools is None or tools.choice == AUTO else {"name": tools.name, "many": tools.many},
            "history_calls": hold_calls(fields.messages),
        }
        max_tokens = fields.max_completion_tokens if fields.max_completion_tokens is not None else fields.max_tokens
    else:
        tools = None
        kind, prompt, num_prompts = prompts(bytes(fields.prompt))
        options = {"add_special_tokens": fields.add_special_tokens is not False, "suffix": _suffix(fields, kind, num_prompts)}
        max_tokens = fields.max_tokens if fields.max_tokens is not None else fields.max_completion_tokens
    if fields.model is not None:
        check_text(fields.model, "model")
    min_tokens = fields.min_tokens or 0
    if max_tokens is not None and min_tokens > max_tokens:
        raise invalid("min_tokens", f"min_tokens ({min_tokens}) is more than max_tokens ({max_tokens})")
    grammar_field, grammar = grammar_of(fields)
    outputs = outputs_of(fields, endpoint == CHAT)
    if max_tokens == 0 and not outputs.echo:
        raise invalid("max_tokens", "max_tokens: 0 is only allowed with echo: true")
    stream_options = fields.stream_options or StreamOptions()
    if fields.stream_options is not None and not fields.stream:
        raise invalid("stream_options", "stream_options is only allowed with stream: true")
    head = Head(
        model=fields.model,
        temperature=fields.temperature,
        top_p=fields.top_p,
        top_k=fields.top_k,
        seed=fields.seed,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        ignore_eos=bool(fields.ignore_eos),
        stop=_stops(fields.stop),
        stop_token_ids=fields.stop_token_ids or [],
        stream=bool(fields.stream),
        include_usage=bool(stream_options.include_usage),
        continuous_usage=bool(stream_options.continuous_usage_stats),
        priority=fields.priority or 0,
        prompt_kind=kind,
        num_prompts=num_prompts,
        options=options,
        tools=tools,
        grammar_field=grammar_field,
        grammar=grammar,
        cache_salt=fields.cache_salt or "",
        keep_last=checked_keep_last(fields.truncate_prompt_tokens),
        outputs=outputs,
    )
    return head, prompt


def _template_kwargs(fields: ChatBody) -> dict[str, Any]:
    """Returns the template's variables: reasoning_effort, and chat_template_kwargs, which may replace it. "none" also turns
    enable_thinking off, the switch of Qwen's and GLM's templates."""
    kwargs: dict[str, Any] = {}
    if fields.reasoning_effort is not None:
        if fields.reasoning_effort not in REASONING_EFFORTS:
            raise invalid("reasoning_effort", f"reasoning_effort must be one of {', '.join(REASONING_EFFORTS)}")
        kwargs["reasoning_effort"] = fields.reasoning_effort
        if fields.reasoning_effort == "none":
            kwargs["enable_thinking"] = False
    return kwargs | (fields.chat_template_kwargs or {})


def _continues(fields: ChatBody) -> str:
    """Returns what of the last message the reply continues, CONTINUES_ANSWER or CONTINUES_REASONING; "" for a new message."""
    if not fields.continue_final_message:
        return ""
    if fields.add_generation_prompt:
        raise invalid("continue_final_message", "continue_final_message: add_generation_prompt: true begins another message")
    last = fields.messages[-1]
    if last.role != "assistant" or not last.content or last.tool_calls:
        raise invalid("continue_final_message", "continue_final_message: the last message must be the assistant's, with text")
    text = content_of(last, f"messages[{len(fields.messages) - 1}]") or ""
    return CONTINUES_REASONING if text.rfind(OPEN) > text.rfind(CLOSE) else CONTINUES_ANSWER


def _suffix(fields: CompletionBody, kind: str, num_prompts: int) -> str:
    if not fields.suffix:
        return ""
    check_text(fields.suffix, "suffix")
    if kind != "text":
        raise invalid("suffix", "suffix: the prompt must be text; token ids hold the tokens for filling in the middle themselves")
    if fields.echo:
        raise invalid("suffix", "suffix and echo: only one of them is allowed")
    if fields.truncate_prompt_tokens:
        raise invalid("suffix", "suffix and truncate_prompt_tokens: only one of them is allowed")
    if (num := len(fields.suffix) * num_prompts) > MAX_SUFFIX_CHARACTERS:
        raise invalid("suffix", f"suffix: behind {num_prompts} prompts it has {num} characters, more than {MAX_SUFFIX_CHARACTERS}")
    return fields.suffix


def _stops(stop: str | list[str] | None) -> list[str]:
    stops = [stop] if isinstance(stop, str) else stop or []
    if len(stops) > MAX_STOPS:
        raise invalid("stop", f"stop: {len(stops)} strings are more than the {MAX_STOPS} one request may name")
    for each in stops:
        if not each:
            raise invalid("stop", "stop: a stop string is empty")
        if len(each) > 1024:
            raise invalid("stop", "stop: a stop string is longer than 1024 characters")
    return stops
