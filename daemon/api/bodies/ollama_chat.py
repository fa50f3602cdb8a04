"""The body of Ollama's /api/chat, converted to the body of a chat."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta, Raw, Struct

from daemon.api.bodies import chat
from daemon.api.bodies.common import Head
from daemon.api.bodies.decode import check_text, decode, invalid
from daemon.api.bodies.messages import Called, CalledFunction, Message
from daemon.api.bodies.ollama import (
    OllamaBody,
    head_of_load,
    refuse_unserved,
    shared_fields,
    template_fields,
    with_keep_alive,
)
from daemon.api.bodies.unsupported import neutral, refuse_unsupported

MAX_MESSAGES = 100_000


class Function(Struct):
    name: str
    arguments: dict[str, Any] = {}


class ToolCall(Struct):
    function: Function
    id: str | None = None


class Turn(Struct):
    role: str
    content: str | None = None
    thinking: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None
    images: Annotated[Raw, neutral("[]")] = Raw()


class OllamaChatBody(OllamaBody, kw_only=True):
    messages: Annotated[list[Turn], Meta(max_length=MAX_MESSAGES)]
    tools: Raw = Raw()


MEANINGS = {
    "messages": "role, content, thinking, tool_calls, tool_name; a last assistant's is continued; none: the model is loaded",
    "tools": "functions the model may call, as OpenAI's",
}
_decoder = msgspec.json.Decoder(OllamaChatBody)
_json = msgspec.json.encode


def parse(body: bytes) -> tuple[Head, bytes]:
    """Parses a body. Returns the fields that the daemon needs and, as msgpack for the text worker, the messages, both as for a chat
    completion. Raises BadRequest (400) naming the field."""
    fields: OllamaChatBody = decode(_decoder, body, "")
    refuse_unserved(fields)
    if not fields.messages:
        return head_of_load(fields)
    messages = _messages(fields.messages)
    last = messages[-1]
    if last.role == "assistant" and last.tool_calls:
        raise invalid("messages", "messages: the last one calls a tool, and its result is missing")
    as_chat = chat.ChatBody(
        messages=messages,
        continue_final_message=(last.role == "assistant" and bool(last.content)) or None,
        tools=fields.tools,
        **shared_fields(fields),
        **template_fields(fields.think),
    )
    return with_keep_alive(chat.head_of_chat(as_chat), fields.keep_alive)


def _messages(turns: list[Turn]) -> list[Message]:
    """Converts Ollama's messages to those of a chat. A tool call without an id gets one. A tool result without an id gets that of
    the earliest unanswered call of its tool. Raises BadRequest naming the field."""
    messages: list[Message] = []
    open_calls: list[Called] = []  # calls whose results have not come yet
    num_calls = 0
    for at, turn in enumerate(turns):
        where = f"messages[{at}]"
        refuse_unsupported(turn, f"{where}.")
        if turn.role == "tool":
            for name, value in (("tool_name", turn.tool_name), ("tool_call_id", turn.tool_call_id)):
                check_text(value or "", f"{where}.{name}")
            call_id = turn.tool_call_id or _answered(open_calls, turn.tool_name)
            messages.append(Message("tool", turn.content, name=turn.tool_name, tool_call_id=call_id))
            continue
        check_text(turn.thinking or "", f"{where}.thinking")
        calls: list[Called] = []
        for call in turn.tool_calls or []:
            arguments = _json(call.function.arguments).decode()
            num_calls += 1
            # nine letters and digits, as Mistral's templates require
            calls.append(Called(CalledFunction(call.function.name, arguments), call.id or f"call{num_calls:05d}"))
        open_calls = calls[:]
        messages.append(Message(turn.role, turn.content, tool_calls=calls or None, reasoning_content=turn.thinking or None))
    return messages


def _answered(open_calls: list[Called], tool_name: str | None) -> str | None:
    """Finds the call that a tool result without an id answers: the first open call of the tool `tool_name`, or the first of all if
    that is None. Removes it from `open_calls` and returns its id; None if there is no such call."""
    for call in open_calls:
        if tool_name in (None, call.function.name):
            open_calls.remove(call)
            return call.id
    return None
