"""The messages and documents of a chat, packed for the text worker."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import Struct

from daemon.api.bodies.decode import check_text, decode, invalid
from daemon.errors import BadRequest
from daemon.text.tool_parsers.call_numbers import CallNumbers

_ROLES = frozenset(["system", "developer", "user", "assistant", "tool", "function"])
_documents_decoder = msgspec.json.Decoder(list[dict[str, Any]])
_pack = msgspec.msgpack.encode


class ContentPart(Struct):
    type: str
    text: str | None = None
    refusal: str | None = None


class CalledFunction(Struct):
    name: str
    arguments: str | dict[str, Any] = ""


class Called(Struct):
    """A call that the model made in an earlier message."""

    function: CalledFunction
    id: str = ""
    type: Literal["function"] = "function"


class Message(Struct, omit_defaults=True):
    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[Called] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    audio: Any = None  # a spoken answer of OpenAI's models
    function_call: Any = None  # the predecessor of tool_calls in OpenAI's API


# fields of a message that would be lost in the prompt -> what the error says
_REFUSED_FIELDS = {
    "audio": "is not supported, only text is",
    "function_call": "is not supported; tool_calls, and a message of the role tool for the result, are",
}


def hold_calls(messages: list[Message]) -> bool:
    """Returns whether the messages contain a tool call or the result of one."""
    return any(message.tool_calls or message.role in ("tool", "function") for message in messages)


def next_call_number(messages: list[Message]) -> int:
    """Returns the number that the conversation's next tool call gets, counted from 0, for models whose call ids contain such a
    number."""
    numbers = CallNumbers()
    for message in messages:
        for call in message.tool_calls or ():
            numbers.id_of(call.function.name, call.id)
    return numbers.next


def pack_messages(messages: list[Message]) -> bytes:
    """Checks messages and returns them as msgpack, in the form that chat templates expect: each content is one string. Raises
    BadRequest naming the field."""
    plain: list[dict[str, Any]] = []
    for at, message in enumerate(messages):
        where = f"messages[{at}]"
        if message.role not in _ROLES:
            raise invalid(f"{where}.role", f"{where}.role must be one of {', '.join(sorted(_ROLES))}")
        for name, why in _REFUSED_FIELDS.items():
            if getattr(message, name) is not None:
                raise BadRequest("unsupported_parameter", f"{where}.{name} {why}", param=f"{where}.{name}")
        content = content_of(message, where)
        if content is None and message.role != "assistant":
            raise invalid(f"{where}.content", f"{where}.content is missing")
        each: dict[str, Any] = {"role": message.role, "content": content}
        for name in ("name", "tool_call_id", "reasoning_content"):
            if (value := getattr(message, name)) is not None:
                check_text(value, f"{where}.{name}")
                each[name] = value
        if message.tool_calls:
            each["tool_calls"] = [_called(call, f"{where}.tool_calls[{at}]") for at, call in enumerate(message.tool_calls)]
        plain.append(each)
    return packed(plain, "messages")


def content_of(message: Message, where: str) -> str | None:
    """Returns the message's text, with its parts joined; for an assistant's message without text, its refusal; None if it has
    neither. where: the message's path in the body, for errors. Raises BadRequest naming the field."""
    if message.refusal is not None:
        if message.role != "assistant":
            raise invalid(f"{where}.refusal", f"{where}.refusal: only messages of the assistant may have one")
        check_text(message.refusal, f"{where}.refusal")
    content = message.content if isinstance(message.content, str | None) else joined(message.content, message.role, where)
    if content is not None:
        check_text(content, f"{where}.content")
    return content or message.refusal or content


def joined(parts: list[ContentPart], role: str, where: str) -> str:
    """Returns the texts of a message's parts joined by line breaks; if it has no text, its refusals, joined in the same way. role:
    the message's role; only the assistant may have refusals. where: the message's path, for errors. Raises BadRequest, which names
    the part, if a part has another type or lacks its text."""
    texts, refusals = [], []
    for at, part in enumerate(parts):
        part_where = f"{where}.content[{at}]"
        if part.type == "text":
            if part.text is None:
                raise invalid(f"{part_where}.text", f"{part_where}.text is missing")
            texts.append(part.text)
        elif part.type == "refusal" and role == "assistant":
            if part.refusal is None:
                raise invalid(f"{part_where}.refusal", f"{part_where}.refusal is missing")
            refusals.append(part.refusal)
        else:
            allowed = "text and refusal parts" if role == "assistant" else "text parts"
            message = f"{part_where}.type: {part.type[:64]!r} is not supported, only {allowed} are"
            raise BadRequest("unsupported_parameter", message, param=f"{part_where}.type")
    return "\n".join(texts) or "\n".join(refusals)


def _called(call: Called, where: str) -> dict[str, Any]:
    check_text(call.function.name, f"{where}.function.name")
    function = {"name": call.function.name, "arguments": call.function.arguments}
    return {"id": call.id, "type": call.type, "function": function}


def checked_documents(data: bytes) -> bytes:
    if data in (b"", b"null", b"[]"):
        return b""
    decode(_documents_decoder, data, "documents")
    return data


def packed(value: object, param: str) -> bytes:
    try:
        return _pack(value)
    except (RecursionError, OverflowError):
        raise invalid(param, f"{param} is nested too deeply, or holds a number out of range") from None
