"""The bodies of /v1/messages and /v1/messages/count_tokens (Anthropic's Messages API), converted to the body of a chat."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Raw, Struct

from daemon.api.bodies import chat
from daemon.api.bodies.common import Head, checked_stops
from daemon.api.bodies.decode import check_text, decode, invalid, needed_text
from daemon.api.bodies.messages import Called, CalledFunction, ContentPart, Message
from daemon.api.bodies.response_format import following
from daemon.api.bodies.unsupported import neutral, refuse_unsupported
from daemon.errors import BadRequest

MAX_MESSAGES = 100_000


class Block(Struct):
    """A block of a message's content, of any type; `type` determines which other fields are required."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[Block] | None = None


class Turn(Struct):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class Tool(Struct):
    name: str
    input_schema: Raw = Raw()
    description: str | None = None
    strict: bool | None = None
    type: str | None = None


class ToolChoice(Struct):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Struct):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Meta(ge=1)] | None = None


class OutputFormat(Struct):
    type: Literal["json_schema"]
    schema: Raw


class OutputConfig(Struct):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class TokenCountBody(Struct, kw_only=True):
    """The body of /v1/messages/count_tokens: the fields of a message request that make up the prompt."""

    model: str | None = None
    messages: Annotated[list[Turn], Meta(min_length=1, max_length=MAX_MESSAGES)]
    system: str | list[Block] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None  # as output_config.format was called in Anthropic's beta; litellm sends it
    container: Annotated[Raw, neutral()] = Raw()
    mcp_servers: Annotated[Raw, neutral("[]")] = Raw()
    # Claude Code sends the last one: no block of thinking is taken out, as without it
    context_management: Annotated[
        Raw, neutral("{}", '{"edits":[]}', '{"edits":[{"type":"clear_thinking_20251015","keep":"all"}]}')
    ] = Raw()


class MessagesBody(TokenCountBody, kw_only=True):
    max_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)]
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None


COUNT_MEANINGS = {
    "model": "name or alias; below `/m/MODEL` it may be left out",
    "messages": "of the user, the assistant and, with instructions from there on, the system; text, `tool_use`, `tool_result` and "
    "`thinking` blocks; a last one of the assistant is continued",
    "system": "text, or text blocks",
    "tools": "name, description, input_schema; the tools that Anthropic's own servers run are refused",
    "tool_choice": "auto, any, tool with a name, or none; `disable_parallel_tool_use`",
    "thinking": "enabled or disabled, given to the template as `enable_thinking`; budget_tokens is not enforced",
    "output_config": "effort, given to the template as `reasoning_effort` (max as xhigh); format: a JSON schema for the answer",
    "output_format": "the same as `output_config.format`, by its older name",
}
MEANINGS = {
    "max_tokens": "where the context leaves less, the answer may end with `model_context_window_exceeded`; 0: only the "
    "prompt is computed, so that later requests find it in the prefix cache",
    "stop_sequences": "up to 16 strings; the text ends before them",
    "stream": "server-sent events, as Anthropic has them",
    "temperature": "0 is greedy; default: the model's settings, then the checkpoint's, then 1",
    "top_p": "nucleus; 0: the likeliest token",
    "top_k": "0: all",
    "metadata": "read and not used",
    "service_tier": "read and not used",
}
_decoder = msgspec.json.Decoder(MessagesBody)
_count_decoder = msgspec.json.Decoder(TokenCountBody)
_json = msgspec.json.encode


def parse(body: bytes) -> tuple[Head, bytes]:
    """Parses a body. Returns the fields that the daemon needs and, as msgpack for the text worker, the messages, both as for a chat
    completion. Raises BadRequest (400) naming the field."""
    fields: MessagesBody = decode(_decoder, body, "")
    refuse_unsupported(fields)
    as_chat = _chat(fields)
    as_chat.stream = fields.stream
    as_chat.temperature, as_chat.top_p, as_chat.top_k = fields.temperature, fields.top_p, fields.top_k
    as_chat.stop = checked_stops(fields.stop_sequences or [], "stop_sequences")
    head, messages = chat.head_of_chat(as_chat)
    head.max_tokens = fields.max_tokens  # set here, because a chat may not have 0
    return head, messages


def parse_count(body: bytes) -> tuple[Head, bytes]:
    """Parses a body. Returns the fields that the daemon needs and, as msgpack for the text worker, the messages, both as for a chat
    completion. Raises BadRequest (400) naming the field."""
    fields: TokenCountBody = decode(_count_decoder, body, "")
    refuse_unsupported(fields)
    return chat.head_of_chat(_chat(fields))


def _chat(fields: TokenCountBody) -> chat.ChatBody:
    messages = _system(fields.system)
    for at, turn in enumerate(fields.messages):
        messages += _OF_ROLE[turn.role](turn, f"messages[{at}]")
    messages = _merged(messages)
    last = messages[-1]
    if last.role == "assistant" and not last.content and not last.tool_calls:
        if last.reasoning_content or len(messages) == 1:
            raise invalid("messages", "messages: the last one is the assistant's and has no text to go on from")
        messages.pop()  # Anthropic's API allows an empty one at the end
        last = messages[-1]
    if last.role == "assistant" and last.tool_calls:
        raise invalid("messages", "messages: the last one calls a tool, and its result is missing")
    config = fields.output_config or OutputConfig()
    wanted = config.format or fields.output_format
    thinking = fields.thinking.type if fields.thinking is not None else "adaptive"
    choice = fields.tool_choice or ToolChoice("auto")
    return chat.ChatBody(
        model=fields.model,
        messages=messages,
        continue_final_message=last.role == "assistant" or None,
        reasoning_effort=config.effort,
        chat_template_kwargs=None if thinking == "adaptive" else {"enable_thinking": thinking == "enabled"},
        response_format=Raw() if wanted is None else following(wanted.schema),
        tools=_tools(fields.tools or []),
        tool_choice=_tool_choice(choice, fields.tools or []),
        parallel_tool_calls=not choice.disable_parallel_tool_use,
    )


def _system(system: str | list[Block] | None) -> list[Message]:
    if not system:
        return []
    return [Message("system", _text(system, "system"))]


def _text(content: str | list[Block], where: str) -> str | list[ContentPart]:
    """Converts the content of a message to a chat's form: a string stays unchanged, and text blocks become content parts. where:
    the content's path, for errors. Raises BadRequest for blocks of other types."""
    if isinstance(content, str):
        check_text(content, where)
        return content
    return [_part(block, f"{where}[{at}]") for at, block in enumerate(content)]


def _part(block: Block, where: str) -> ContentPart:
    if block.type != "text":
        raise BadRequest("unsupported_parameter", f"{where}.type: {block.type[:64]!r} is not supported here", param=f"{where}.type")
    return ContentPart("text", needed_text(block.text, f"{where}.text"))


def _user(turn: Turn, where: str) -> list[Message]:
    """Converts a user's turn to messages of a chat: each tool result becomes a message of the role `tool`, each text block one of
    the role `user`, in the order of the blocks. where: the turn's path, for errors."""
    if isinstance(turn.content, str):
        check_text(turn.content, f"{where}.content")
        return [Message("user", [ContentPart("text", turn.content)])]
    found: list[Message] = []
    for at, block in enumerate(turn.content):
        place = f"{where}.content[{at}]"
        if block.type == "tool_result":
            content = _text(block.content or "", f"{place}.content")
            found.append(Message("tool", content, tool_call_id=needed_text(block.tool_use_id, f"{place}.tool_use_id")))
        else:
            found.append(Message("user", [_part(block, place)]))
    return found or [Message("user", [])]


def _instruction(turn: Turn, where: str) -> list[Message]:
    return [Message("system", _text(turn.content, f"{where}.content"))]


def _assistant(turn: Turn, where: str) -> list[Message]:
    if isinstance(turn.content, str):
        check_text(turn.content, f"{where}.content")
        return [Message("assistant", turn.content)]
    parts: list[ContentPart] = []
    calls: list[Called] = []
    thoughts: list[str] = []
    for at, block in enumerate(turn.content):
        place = f"{where}.content[{at}]"
        if block.type == "tool_use":
            name = needed_text(block.name, f"{place}.name")
            arguments = _json(block.input or {}).decode()
            calls.append(Called(CalledFunction(name, arguments), needed_text(block.id, f"{place}.id")))
        elif block.type == "thinking":
            thoughts.append(needed_text(block.thinking, f"{place}.thinking"))
        elif block.type != "redacted_thinking":  # which only Anthropic's models could read
            parts.append(_part(block, place))
    return [Message("assistant", parts or "", tool_calls=calls or None, reasoning_content="\n".join(thoughts) or None)]


_OF_ROLE = {"user": _user, "assistant": _assistant, "system": _instruction}


def _merged(messages: list[Message]) -> list[Message]:
    """Returns the messages with consecutive messages of the user joined into one. Anthropic's API allows several in a row, and many
    chat templates refuse them."""
    merged: list[Message] = []
    for message in messages:
        before = merged[-1] if merged else None
        if before is not None and before.role == message.role == "user":
            before.content = [*_parts(before), *_parts(message)]
        else:
            merged.append(message)
    return merged


def _parts(message: Message) -> list[ContentPart]:
    assert isinstance(message.content, list)
    return message.content


def _tools(tools: list[Tool]) -> Raw:
    """Returns the tools as the JSON of a chat's `tools`, empty if there are none. Raises BadRequest for a tool that Anthropic's own
    servers would run."""
    shown = []
    for at, tool in enumerate(tools):
        if tool.type not in (None, "custom"):
            where = f"tools[{at}].type"
            raise BadRequest(
                "unsupported_parameter", f"{where}: only custom tools are supported, not {tool.type[:64]!r}", param=where
            )
        function: dict[str, Any] = {"name": tool.name, "parameters": tool.input_schema or None, "strict": tool.strict}
        if tool.description is not None:
            function["description"] = tool.description
        shown.append({"type": "function", "function": {name: value for name, value in function.items() if value is not None}})
    return Raw(_json(shown)) if shown else Raw()


def _tool_choice(choice: ToolChoice, tools: list[Tool]) -> Raw:
    if not tools and choice.type in ("any", "tool"):
        raise invalid("tool_choice", f"tool_choice: {choice.type} needs tools")
    if choice.type == "tool":
        if choice.name is None:
            raise invalid("tool_choice.name", "tool_choice.name is missing")
        return Raw(_json({"type": "function", "function": {"name": choice.name}}))
    return Raw(_json("required" if choice.type == "any" else choice.type))
