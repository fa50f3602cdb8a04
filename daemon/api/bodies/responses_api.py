"""The body of /v1/responses (OpenAI's Responses API), converted to the body of a chat."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Raw, Struct, structs

from daemon.api.bodies import chat
from daemon.api.bodies.common import Head, Sampling
from daemon.api.bodies.decode import check_text, decode, invalid, needed_text
from daemon.api.bodies.messages import Message
from daemon.api.bodies.namespaces import joined_name
from daemon.api.bodies.response_format import JSON_OBJECT, following
from daemon.api.bodies.responses_input import Item, chat_messages
from daemon.api.bodies.unsupported import neutral, refuse_unsupported
from daemon.errors import BadRequest

MAX_ITEMS = 100_000
_TEXT_LOGPROBS = "message.output_text.logprobs"

Items = Annotated[list[Item], Meta(max_length=MAX_ITEMS)]
MetadataValue = Annotated[str, Meta(max_length=512)]
Metadata = Annotated[dict[Annotated[str, Meta(max_length=64)], MetadataValue], Meta(max_length=16)]


class Tool(Struct):
    type: str
    name: str | None = None
    description: str | None = None
    parameters: Raw = Raw()
    strict: bool | None = None
    tools: list[Tool] | None = None  # of a namespace: its functions


class ToolChoice(Struct):
    """The object form of tool_choice: the name of the function that must be called, or the list of the tools that may be called."""

    type: str
    name: str | None = None
    mode: Literal["auto", "required"] = "auto"
    tools: list[Tool] = []


class Reasoning(Struct):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class TextFormat(Struct):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema: Raw = Raw()
    description: str | None = None
    strict: bool | None = None


class TextConfig(Struct):
    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class StreamOptions(Struct):
    include_obfuscation: bool | None = None


class ResponsesBody(Sampling, kw_only=True):
    model: str | None = None
    input: str | Items
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    stream: bool | None = None
    background: bool | None = None
    stream_options: StreamOptions | None = None
    max_output_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    text: TextConfig | None = None
    metadata: Metadata | None = None
    include: list[str] | None = None
    max_tool_calls: int | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: str | None = None
    context_management: Annotated[Raw, neutral("[]")] = Raw()
    conversation: Annotated[Raw, neutral()] = Raw()
    moderation: Annotated[Raw, neutral()] = Raw()
    chat_template_kwargs: dict[str, Any] | None = None
    # what chats call otherwise, or have and responses do not
    max_tokens: Annotated[Raw, neutral()] = Raw()
    max_completion_tokens: Annotated[Raw, neutral()] = Raw()
    messages: Annotated[Raw, neutral()] = Raw()
    n: Annotated[Raw, neutral("1")] = Raw()
    best_of: Annotated[Raw, neutral("0", "1")] = Raw()
    logprobs: Annotated[Raw, neutral("false")] = Raw()
    prompt_logprobs: Annotated[Raw, neutral()] = Raw()
    reasoning_effort: Annotated[Raw, neutral()] = Raw()
    verbosity: Annotated[Raw, neutral()] = Raw()
    response_format: Annotated[Raw, neutral('{"type":"text"}')] = Raw()
    regex: Annotated[Raw, neutral()] = Raw()
    grammar: Annotated[Raw, neutral()] = Raw()
    guided_json: Annotated[Raw, neutral()] = Raw()
    guided_regex: Annotated[Raw, neutral()] = Raw()
    guided_grammar: Annotated[Raw, neutral()] = Raw()
    guided_choice: Annotated[Raw, neutral()] = Raw()
    structured_outputs: Annotated[Raw, neutral()] = Raw()
    allowed_token_ids: Annotated[Raw, neutral()] = Raw()
    bad_words: Annotated[Raw, neutral("[]")] = Raw()
    truncate_prompt_tokens: Annotated[Raw, neutral()] = Raw()
    prompt: Annotated[Raw, neutral()] = Raw()
    top_logprobs: Annotated[Raw, neutral("0")] = Raw()
    truncation: Annotated[Raw, neutral('"disabled"')] = Raw()


MEANINGS = {
    "model": "name or alias; below `/m/MODEL` it may be left out",
    "input": "text, or items: messages of text, function_call, function_call_output, reasoning, item_reference",
    "instructions": "the first message, of the role system; not taken over by responses that follow",
    "previous_response_id": "a kept response of the same tenant, whose conversation goes on",
    "store": "default true: kept for later requests, as long as there is room (stored_responses_bytes)",
    "stream": "server-sent events, as OpenAI has them for responses",
    "background": "true: made without a client waiting; `GET /v1/responses/ID` fetches it, whatever becomes of this connection",
    "stream_options": "include_obfuscation: read and not used",
    "max_output_tokens": "an answer that it cuts short is `incomplete`; default: what the context leaves",
    "tools": "functions the model may call, also in namespaces; the tools that OpenAI's own servers run are refused",
    "tool_choice": "auto, none, required, a function by name, or allowed_tools: some of the functions",
    "parallel_tool_calls": "false: one call at most",
    "reasoning": "effort, given to the template as `reasoning_effort` (max as xhigh); a summary is not written",
    "text": "format: text, json_object or json_schema, which the answer follows; verbosity is given to the template",
    "metadata": "up to 16 texts, shown in the response",
    "include": "read and not used, as the items it speaks of do not occur; log-probabilities are refused",
    "max_tool_calls": "read and not used: it counts calls of OpenAI's own tools",
    "user": "read and not used",
    "safety_identifier": "read and not used",
    "prompt_cache_key": "read and not used: prefixes are cached by themselves",
    "service_tier": "read and not used",
    "chat_template_kwargs": chat.MEANINGS["chat_template_kwargs"],
}


class ResponsesHead(Head, array_like=True):
    """The part of a parsed body that the daemon itself needs. background: whether the response is generated without a waiting
    client. num_instructions: 1 if the first message contains the instructions, else 0. shown: JSON of the request's fields that the
    response repeats. input: the field `input`, as JSON, if the response is to be stored. namespaces: the name by which the model
    knows a function -> its namespace and its name there; functions outside of namespaces are missing."""

    previous: str = ""  # previous_response_id; "" for none
    store: bool = True
    background: bool = False
    num_instructions: int = 0
    shown: bytes = b"{}"
    input: bytes = b""
    namespaces: dict[str, tuple[str, str]] = msgspec.field(default_factory=dict)


class _Input(Struct):
    """A body of which only the field `input` is decoded, and kept as the JSON that the client sent."""

    input: Raw


_decoder = msgspec.json.Decoder(ResponsesBody)
_input_decoder = msgspec.json.Decoder(_Input)
_json = msgspec.json.encode


def parse(body: bytes) -> tuple[ResponsesHead, bytes]:
    """Parses a body. Returns the fields that the daemon needs, and the messages as msgpack for the text worker. Raises BadRequest
    (400) naming the field."""
    fields: ResponsesBody = decode(_decoder, body, "")
    refuse_unsupported(fields)
    if _TEXT_LOGPROBS in (fields.include or []):
        raise BadRequest("unsupported_parameter", f"include: {_TEXT_LOGPROBS} is not supported by this server", param="include")
    messages = chat_messages(fields.input)
    if not messages and not fields.previous_response_id:
        raise invalid("input", "input holds nothing to answer")
    if fields.background and fields.store is False:
        raise invalid("background", "background: a response that is made in the background is stored; store cannot be false")
    if fields.instructions:
        check_text(fields.instructions, "instructions")
        messages.insert(0, Message("system", fields.instructions))
    tools, namespaces = _functions(fields.tools or [])
    as_chat = _chat(fields, messages, tools)
    head, packed = chat.head_of_chat(as_chat)
    return ResponsesHead(
        **structs.asdict(head),
        previous=fields.previous_response_id or "",
        store=fields.store is not False,
        background=fields.background is True,
        num_instructions=int(bool(fields.instructions)),
        shown=_shown(fields),
        input=_input(body) if fields.store is not False else b"",
        namespaces=namespaces,
    ), packed


def _input(body: bytes) -> bytes:
    """Returns the JSON of the body's field `input` as the client sent it, including fields of its items that hearthd does not use.
    Bytes that are not UTF-8 are replaced."""
    return bytes(_input_decoder.decode(body).input).decode(errors="replace").encode()  # what is not read may be no UTF-8


def _chat(fields: ResponsesBody, messages: list[Message], tools: list[Tool]) -> chat.ChatBody:
    """Returns the body of a chat that asks for the same. messages, tools: its messages and functions."""
    text, reasoning = fields.text or TextConfig(), fields.reasoning or Reasoning()
    offered, choice = _offered(fields.tool_choice, tools)
    return chat.ChatBody(
        model=fields.model,
        messages=messages,
        max_tokens=fields.max_output_tokens,
        stream=fields.stream,
        reasoning_effort=reasoning.effort,
        verbosity=text.verbosity,
        chat_template_kwargs=fields.chat_template_kwargs,
        response_format=_response_format(text.format),
        tools=Raw(_json([_function(tool) for tool in offered])) if offered else Raw(),
        tool_choice=choice if offered else Raw(),
        parallel_tool_calls=fields.parallel_tool_calls,
        **{name: getattr(fields, name) for name in Sampling.__annotations__},
    )


def _functions(tools: list[Tool]) -> tuple[list[Tool], dict[str, tuple[str, str]]]:
    """Returns all functions by the names that the model knows them by, those of namespaces with the namespace's description before
    their own; and of these the names, namespaces and names there. Raises BadRequest naming the field."""
    functions: list[Tool] = []
    namespaces: dict[str, tuple[str, str]] = {}
    for at, tool in enumerate(tools):
        where = f"tools[{at}]"
        if tool.type != "namespace":
            _check_tool(tool, where)
            functions.append(tool)
            continue
        space = needed_text(tool.name, f"{where}.name")
        for inner_at, inner in enumerate(tool.tools or []):
            _check_tool(inner, f"{where}.tools[{inner_at}]")
            name = str(inner.name)
            known = joined_name(space, name)
            namespaces[known] = space, name
            description = "\n\n".join(text for text in (tool.description, inner.description) if text) or None
            functions.append(structs.replace(inner, name=known, description=description))
    return functions, namespaces


def _offered(choice: Literal["none", "auto", "required"] | ToolChoice | None, tools: list[Tool]) -> tuple[list[Tool], Raw]:
    """Returns the functions that the model may call, and tool_choice in the form of a chat's. tools: all functions. Raises
    BadRequest naming the field."""
    if choice is None or isinstance(choice, str):
        if choice == "required" and not tools:
            raise invalid("tool_choice", "tool_choice: required needs tools")
        return tools, Raw(_json(choice or "auto"))
    names = [tool.name for tool in tools]
    if choice.type == "allowed_tools":
        for at, allowed in enumerate(choice.tools):
            _check_tool(allowed, f"tool_choice.tools[{at}]")
            if allowed.name not in names:
                where = f"tool_choice.tools[{at}].name"
                raise invalid(where, f"{where}: {str(allowed.name)[:128]!r} is none of the tools")
        allowed_names = {allowed.name for allowed in choice.tools}
        return [tool for tool in tools if tool.name in allowed_names], Raw(_json(choice.mode))
    if choice.type != "function":
        message = f"tool_choice.type: {choice.type[:64]!r} is not supported; function and allowed_tools are"
        raise BadRequest("unsupported_parameter", message, param="tool_choice.type")
    if choice.name not in names:
        raise invalid("tool_choice.name", f"tool_choice.name: {str(choice.name)[:128]!r} is none of the tools")
    return tools, Raw(_json({"type": "function", "function": {"name": choice.name}}))


def _check_tool(tool: Tool, where: str) -> None:
    if tool.type != "function":
        message = f"{where}.type: only function tools and namespaces of them are supported, not {tool.type[:64]!r}"
        raise BadRequest("unsupported_parameter", message, param=f"{where}.type")
    if tool.name is None:
        raise invalid(f"{where}.name", f"{where}.name is missing")


def _function(tool: Tool) -> dict[str, Any]:
    """Returns a tool as an object of a chat's `tools`."""
    function: dict[str, Any] = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    if _is_given(tool.parameters):
        function["parameters"] = tool.parameters
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function}


def _response_format(wanted: TextFormat | None) -> Raw:
    if wanted is None or wanted.type == "text":
        return Raw()
    if wanted.type == "json_object":
        return JSON_OBJECT
    if not _is_given(wanted.schema):
        raise invalid("text.format.schema", "text.format.schema is missing")
    return following(wanted.schema)


def _shown(fields: ResponsesBody) -> bytes:
    """Returns the JSON of the request's fields that the response repeats, with defaults for those that were left out."""
    choice, reasoning, text = fields.tool_choice, fields.reasoning or Reasoning(), fields.text or TextConfig()
    return _json(
        {
            "background": fields.background is True,
            "instructions": fields.instructions,
            "max_output_tokens": fields.max_output_tokens,
            "max_tool_calls": fields.max_tool_calls,
            "metadata": fields.metadata or {},
            "parallel_tool_calls": fields.parallel_tool_calls is not False,
            "previous_response_id": fields.previous_response_id,
            "prompt_cache_key": fields.prompt_cache_key,
            "reasoning": {"effort": reasoning.effort, "summary": reasoning.summary or reasoning.generate_summary},
            "safety_identifier": fields.safety_identifier,
            "store": fields.store is not False,
            "text": {"format": _shown_format(text.format), "verbosity": text.verbosity or "medium"},
            "tool_choice": "auto" if choice is None else choice if isinstance(choice, str) else _shown_choice(choice),
            "tools": [_shown_tool(tool) for tool in fields.tools or []],
            **({} if fields.user is None else {"user": fields.user}),
        }
    )


def _shown_format(given: TextFormat | None) -> dict[str, Any]:
    if given is None or given.type != "json_schema":
        return {"type": "text" if given is None else given.type}
    shown = {"type": given.type, "name": given.name or "answer", "schema": given.schema, "strict": given.strict is not False}
    return shown if given.description is None else shown | {"description": given.description}


def _shown_choice(choice: ToolChoice) -> dict[str, Any]:
    if choice.type == "function":
        return {"type": "function", "name": choice.name}
    allowed = [{"type": "function", "name": tool.name} for tool in choice.tools]
    return {"type": choice.type, "mode": choice.mode, "tools": allowed}


def _shown_tool(tool: Tool) -> dict[str, Any]:
    if tool.type == "namespace":
        inner = [_shown_tool(each) for each in tool.tools or []]
        return {"type": tool.type, "name": tool.name, "description": tool.description or "", "tools": inner}
    parameters = tool.parameters if _is_given(tool.parameters) else None
    shown = {"type": "function", "name": tool.name, "parameters": parameters, "strict": bool(tool.strict)}
    return shown if tool.description is None else shown | {"description": tool.description}


def _is_given(value: Raw) -> bool:
    return bytes(value) not in (b"", b"null")
