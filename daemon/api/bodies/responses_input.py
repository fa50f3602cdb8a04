"""The field `input` of /v1/responses, converted to the messages of a chat."""

from __future__ import annotations

from msgspec import Struct

from daemon.api.bodies.decode import check_text, invalid, needed_text
from daemon.api.bodies.messages import Called, CalledFunction, Message
from daemon.api.bodies.namespaces import joined_name
from daemon.errors import BadRequest

_ROLES = ("user", "assistant", "system", "developer")
TEXTS = ("input_text", "output_text", "text")


class ItemPart(Struct):
    """A part of a message, of a function's output or of reasoning; `type` determines which other field is required."""

    type: str = "input_text"
    text: str | None = None
    refusal: str | None = None


class Item(Struct):
    """An item of the `input` list, of any type; `type` determines which other fields are required."""

    type: str | None = None  # None: the item is a message
    role: str | None = None
    content: str | list[ItemPart] | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None  # of a call: that of its function
    arguments: str | None = None
    output: str | list[ItemPart] | None = None
    summary: list[ItemPart] | None = None


def chat_messages(given: str | list[Item]) -> list[Message]:
    """Converts the field `input` to messages of a chat. Consecutive reasoning, text and calls of the assistant become one message.
    Raises BadRequest naming the field."""
    if isinstance(given, str):
        check_text(given, "input")
        return [Message("user", given)]
    messages: list[Message] = []
    turn: Message | None = None  # the assistant's current message, to which further items may belong
    for at, item in enumerate(given):
        where = f"input[{at}]"
        kind = item.type or "message"
        if kind == "message" and item.role != "assistant":
            turn = None
            messages.append(_message(item, where))
        elif kind == "function_call_output":
            turn = None
            call_id = needed_text(item.call_id, f"{where}.call_id")
            messages.append(Message("tool", _text(item.output, f"{where}.output"), tool_call_id=call_id))
        elif kind in ("message", "function_call", "reasoning"):
            if turn is None or _begins_another(turn, kind):
                turn = Message("assistant")
                messages.append(turn)
            _add(turn, item, kind, where)
        else:
            raise BadRequest(
                "unsupported_parameter",
                f"{where}.type: {kind[:64]!r} is not supported; message, function_call, function_call_output and reasoning are",
                param=f"{where}.type",
            )
    # templates cannot show reasoning without text or calls
    return [each for each in messages if each.role != "assistant" or each.content is not None or each.tool_calls]


def _begins_another(turn: Message, kind: str) -> bool:
    """Returns whether an item of the assistant starts a new message: a text or reasoning does if the current message already has
    text or calls. turn: the current message. kind: the item's type."""
    return kind != "function_call" and (turn.tool_calls is not None or turn.content is not None)


def _add(turn: Message, item: Item, kind: str, where: str) -> None:
    if kind == "message":
        turn.content = _text(item.content, f"{where}.content")
    elif kind == "reasoning":
        field = "content" if item.content else "summary"
        parts = item.content or item.summary or []
        text = _text(parts, f"{where}.{field}", kinds=("reasoning_text", "summary_text"))
        if text:
            turn.reasoning_content = text if turn.reasoning_content is None else f"{turn.reasoning_content}\n{text}"
    else:
        check_text(item.namespace or "", f"{where}.namespace")
        name = joined_name(item.namespace, needed_text(item.name, f"{where}.name"))
        function = CalledFunction(name, needed_text(item.arguments, f"{where}.arguments"))
        turn.tool_calls = [*(turn.tool_calls or []), Called(function, needed_text(item.call_id, f"{where}.call_id"))]


def _message(item: Item, where: str) -> Message:
    if item.role not in _ROLES:
        raise invalid(f"{where}.role", f"{where}.role must be one of {', '.join(_ROLES)}")
    return Message(item.role, _text(item.content, f"{where}.content"))


def _text(content: str | list[ItemPart] | None, where: str, kinds: tuple[str, ...] = TEXTS) -> str:
    """Returns `content` if it is a text, or the texts of its parts joined by line breaks. where: the field's path, for errors.
    kinds: the types of parts that are allowed; refusals always are. Raises BadRequest naming the field."""
    if content is None:
        raise invalid(where, f"{where} is missing")
    if isinstance(content, str):
        check_text(content, where)
        return content
    texts = []
    for at, part in enumerate(content):
        place = f"{where}[{at}]"
        if part.type == "refusal":
            texts.append(needed_text(part.refusal, f"{place}.refusal"))
        elif part.type in kinds:
            texts.append(needed_text(part.text, f"{place}.text"))
        else:
            raise BadRequest(
                "unsupported_parameter", f"{place}.type: {part.type[:64]!r} is not supported, only text is", param=f"{place}.type"
            )
    return "\n".join(texts)
