"""The messages and documents of a chat, packed for the text helper."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import Struct

from daemon.api.decode import check_text, decode, invalid
from daemon.errors import BadRequest

_ROLES = frozenset(["system", "developer", "user", "assistant", "tool", "function"])
_documents_decoder = msgspec.json.Decoder(list[dict[str, Any]])
_pack = msgspec.msgpack.encode


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


def pack_messages(messages: list[Message]) -> bytes:
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
            check_text(content, f"{where}.content")
        each: dict[str, Any] = {"role": message.role, "content": content}
        for name in ("name", "tool_call_id", "reasoning_content"):
            if (value := getattr(message, name)) is not None:
                check_text(value, f"{where}.{name}")
                each[name] = value
        if message.tool_calls:
            each["tool_calls"] = [_called(call, f"{where}.tool_calls[{at}]") for at, call in enumerate(message.tool_calls)]
        plain.append(each)
    return packed(plain, "messages")


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
