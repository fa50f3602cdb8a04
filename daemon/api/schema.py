"""Request bodies: decoding, checking, and which fields are known but not built.

`parse(endpoint, body)` gives two parts: the small one (a Struct, every scalar field) and the prompt as msgpack, which only the text
helper looks into. It runs on the event loop for bodies up to INLINE_BYTES and in the text helper above (measured: the costliest
128 KiB, 26,000 token ids, take 2 ms; tiny messages or parts 1 ms).
"""

from __future__ import annotations

from array import array
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Raw, Struct

from daemon.api.decode import decode, invalid
from daemon.api.outputs import MAX_BIASED_TOKENS, MAX_N, MAX_TOP_LOGPROBS, Outputs, outputs_of
from daemon.api.response_format import GRAMMAR_FIELDS, grammar_of
from daemon.api.tools import ToolRequest, tool_request
from daemon.errors import BadRequest

INLINE_BYTES = 128 << 10
MAX_PROMPTS = 1024
MAX_STOPS = 16
CHAT, COMPLETIONS = "chat", "completions"

Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]


NumSequences = Annotated[int, Meta(ge=1, le=MAX_N)]
NumTop = Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Bias = Annotated[float, Meta(ge=-100, le=100)]


class StreamOptions(Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Common(Struct):
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
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None
    n: NumSequences | None = None
    best_of: Annotated[int, Meta(ge=0, le=MAX_N)] | None = None  # OpenAI's specification allows 0
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=100)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    logit_bias: Annotated[dict[str, Bias], Meta(max_length=MAX_BIASED_TOKENS)] | None = None
    # daemon/api/response_format.py
    response_format: Raw = Raw()
    regex: Raw = Raw()
    grammar: Raw = Raw()
    guided_json: Raw = Raw()
    guided_regex: Raw = Raw()
    guided_grammar: Raw = Raw()
    guided_choice: Raw = Raw()
    structured_outputs: Raw = Raw()
    # known, not built: anything but a neutral value is refused
    prompt_logprobs: Raw = Raw()
    functions: Raw = Raw()
    function_call: Raw = Raw()
    modalities: Raw = Raw()
    moderation: Raw = Raw()
    web_search_options: Raw = Raw()
    suffix: Raw = Raw()
    chat_template: Raw = Raw()
    use_beam_search: Raw = Raw()
    include_stop_str_in_output: Raw = Raw()
    skip_special_tokens: Raw = Raw()
    return_token_ids: Raw = Raw()


class Part(Struct):
    type: str
    text: str | None = None


class CalledFunction(Struct):
    name: str
    arguments: str | dict[str, Any] = ""


class Called(Struct):
    """A call the model made before."""

    function: CalledFunction
    id: str = ""
    type: Literal["function"] = "function"


class Message(Struct, omit_defaults=True):
    role: str
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[Called] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class ChatBody(Common, kw_only=True):
    messages: Annotated[list[Message], Meta(min_length=1)]
    add_generation_prompt: bool | None = None
    continue_final_message: Raw = Raw()
    chat_template_kwargs: dict[str, Any] | None = None
    documents: Raw = Raw()
    logprobs: bool | None = None
    top_logprobs: NumTop | None = None
    echo: Raw = Raw()
    tools: Raw = Raw()
    tool_choice: Raw = Raw()
    parallel_tool_calls: bool | None = None


class CompletionBody(Common, kw_only=True):
    prompt: Raw
    add_special_tokens: bool | None = None
    max_tokens: Count | None = None  # 0: only the prompt, with echo
    logprobs: NumTop | bool | None = None
    top_logprobs: Raw = Raw()
    echo: bool | None = None
    tools: Raw = Raw()
    tool_choice: Raw = Raw()


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
    # chat: add_generation_prompt, kwargs (msgpack), tools and documents (JSON) · completions: add_special_tokens
    options: dict[str, Any]
    tools: ToolRequest | None = None
    grammar_field: str = ""
    grammar: str = ""  # as SamplingParams.grammar
    outputs: Outputs = Outputs()


_NEUTRAL: dict[str, tuple[object, ...]] = {
    "tool_choice": ("none",),
    "function_call": ("none",),
    "suffix": ("",),
}
_TRUE_IS_NEUTRAL = frozenset({"skip_special_tokens"})
# Known, and without effect here whatever they say. audio: how speech should sound; `modalities` asks for it, and is refused.
# prediction: a hint for speed.
WITHOUT_EFFECT = ("audio", "prediction")
_ZERO_IS_NEUTRAL = frozenset({"top_logprobs", "prompt_logprobs"})  # nothing is asked for by 0
_UNBUILT = tuple(name for name, kind in Common.__annotations__.items() if kind == "Raw" and name not in GRAMMAR_FIELDS)
_ROLES = frozenset(["system", "developer", "user", "assistant", "tool", "function"])
_decoders: dict[str, msgspec.json.Decoder[Any]] = {
    CHAT: msgspec.json.Decoder(ChatBody),
    COMPLETIONS: msgspec.json.Decoder(CompletionBody),
}
_ids = msgspec.json.Decoder(list[TokenId])
_ids_batch = msgspec.json.Decoder(list[list[TokenId]])
_documents_decoder = msgspec.json.Decoder(list[dict[str, Any]])
_texts = msgspec.json.Decoder(list[str])
_pack = msgspec.msgpack.encode


def parse(endpoint: str, body: bytes) -> tuple[Head, bytes]:
    """Raises BadRequest (400) naming the field."""
    fields: ChatBody | CompletionBody = decode(_decoders[endpoint], body, "")
    _refuse_unbuilt(fields)
    if isinstance(fields, ChatBody):
        _refuse_raw("continue_final_message", fields.continue_final_message)
        _refuse_raw("echo", fields.echo)
        tools, shown = tool_request(fields.tools, fields.tool_choice, fields.parallel_tool_calls)
        kind, prompt, num_prompts = "messages", _messages(fields.messages), 1
        options: dict[str, Any] = {
            "add_generation_prompt": fields.add_generation_prompt is not False,
            "kwargs": _packed(fields.chat_template_kwargs or {}, "chat_template_kwargs"),
            "tools": shown,
            "documents": _documents(bytes(fields.documents)),
        }
        max_tokens = fields.max_completion_tokens if fields.max_completion_tokens is not None else fields.max_tokens
    else:
        _refuse_raw("top_logprobs", fields.top_logprobs)
        _refuse_raw("tools", fields.tools)
        _refuse_raw("tool_choice", fields.tool_choice)
        tools = None
        kind, prompt, num_prompts = prompts(bytes(fields.prompt))
        options = {"add_special_tokens": fields.add_special_tokens is not False}
        max_tokens = fields.max_tokens if fields.max_tokens is not None else fields.max_completion_tokens
    if fields.model is not None:
        _check_text(fields.model, "model")
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
        outputs=outputs,
    )
    return head, prompt


def _refuse_unbuilt(fields: Common) -> None:
    no_calls = bytes(fields.function_call) == b'"none"'
    for name in _UNBUILT:
        if not (name == "functions" and no_calls):  # what may not be called is not missed
            _refuse_raw(name, getattr(fields, name))


def _refuse_raw(name: str, raw: Raw) -> None:
    data = bytes(raw)
    if not data or data == b"null":
        return
    if len(data) <= 256:
        try:
            value = msgspec.json.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise invalid(name, f"{name}: {error}") from None
        if value is None or value == [] or value == {} or (value is False and name not in _TRUE_IS_NEUTRAL):
            return
        if (name in _ZERO_IS_NEUTRAL and value == 0) or (name in _TRUE_IS_NEUTRAL and value is True):
            return
        # compared with its type: 1 == True in Python, but `n: true` is no number
        if any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in _NEUTRAL.get(name, ())):
            return
        if name == "modalities" and value == ["text"]:
            return
    raise BadRequest("unsupported_parameter", f"{name} is not supported by this server", param=name)


def _messages(messages: list[Message]) -> bytes:
    """A list of objects as templates expect them: content is one string."""
    plain: list[dict[str, Any]] = []
    for at, message in enumerate(messages):
        where = f"messages[{at}]"
        if message.role not in _ROLES:
            raise invalid(f"{where}.role", f"{where}.role must be one of {', '.join(sorted(_ROLES))}")
        content = message.content
        if isinstance(content, list):
            texts = []
            for part_at, part in enumerate(content):
                part_where = f"{where}.content[{part_at}]"
                if part.type != "text":
                    raise BadRequest(
                        "unsupported_parameter", f"{part_where}.type: only text parts are supported", param=f"{part_where}.type"
                    )
                if part.text is None:
                    raise invalid(f"{part_where}.text", f"{part_where}.text is missing")
                texts.append(part.text)
            content = "\n".join(texts)
        elif content is None and message.role != "assistant":
            raise invalid(f"{where}.content", f"{where}.content is missing")
        if content is not None:
            _check_text(content, f"{where}.content")
        each: dict[str, Any] = {"role": message.role, "content": content}
        for name in ("name", "tool_call_id", "reasoning_content"):
            if (value := getattr(message, name)) is not None:
                _check_text(value, f"{where}.{name}")
                each[name] = value
        if message.tool_calls:
            each["tool_calls"] = [_called(call, f"{where}.tool_calls[{at}]") for at, call in enumerate(message.tool_calls)]
        plain.append(each)
    return _packed(plain, "messages")


def _called(call: Called, where: str) -> dict[str, Any]:
    _check_text(call.function.name, f"{where}.function.name")
    function = {"name": call.function.name, "arguments": call.function.arguments}
    return {"id": call.id, "type": call.type, "function": function}


def _documents(data: bytes) -> bytes:
    if data in (b"", b"null", b"[]"):
        return b""
    decode(_documents_decoder, data, "documents")
    return data


def _packed(value: object, param: str) -> bytes:
    try:
        return _pack(value)
    except (RecursionError, OverflowError):
        raise invalid(param, f"{param} is nested too deeply, or holds a number out of range") from None


def prompts(raw: bytes, field: str = "prompt") -> tuple[str, bytes, int]:
    """("text", list of strings) or ("ids", list of int32 arrays), as msgpack, and how many."""
    data = raw.lstrip(b" \t\r\n")
    if data[:1] == b'"':
        texts: list[str] = [decode(msgspec.json.Decoder(str), data, field)]
        _check_text(texts[0], field)
        return "text", _pack(texts), 1
    inside = data[1:].lstrip(b" \t\r\n")[:1] if data[:1] == b"[" else b""
    if inside == b'"':
        texts = decode(_texts, data, field)
        for at, text in enumerate(texts):
            _check_text(text, f"{field}[{at}]")
        return "text", _pack(texts), _check_num(len(texts), field)
    if inside == b"[":
        batch: list[list[int]] = decode(_ids_batch, data, field)
        for at, ids in enumerate(batch):
            if not ids:
                raise invalid(f"{field}[{at}]", f"{field}[{at}] is empty")
        return "ids", _pack_ids(batch), _check_num(len(batch), field)
    if inside and (inside.isdigit() or inside == b"-"):
        return "ids", _pack_ids([decode(_ids, data, field)]), 1
    if inside == b"]":
        raise invalid(field, f"{field} is empty")
    raise invalid(field, f"{field} must be a string, a list of strings, a list of token ids or a list of lists of token ids")


def _pack_ids(batch: list[list[int]]) -> bytes:
    """Each prompt as int32: the daemon counts them before it makes Python objects of them."""
    return _pack([array("i", ids).tobytes() for ids in batch])


def _check_num(num_prompts: int, field: str) -> int:
    if num_prompts > MAX_PROMPTS:
        raise invalid(field, f"{field}: {num_prompts} prompts are more than the {MAX_PROMPTS} one request may hold")
    return num_prompts


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


def _check_text(text: str, param: str) -> None:
    if "\0" in text:
        raise invalid(param, f"{param} holds a NUL character")
