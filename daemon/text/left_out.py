"""Converts messages for chat templates that leave out a part of earlier turns. Granite 3's template leaves out calls. Mistral's
leaves out reasoning, unless it is a part of the content."""

from __future__ import annotations

import json
from typing import Any

from daemon.text.tool_parsers import granite

Message = dict[str, Any]


def granite_messages(messages: list[Message]) -> list[Message]:
    """Returns the messages with calls as text at the end of their turns' contents, as Granite 3 writes them."""
    out = []
    for message in messages:
        if calls := message.get("tool_calls"):
            functions = [{key: call["function"][key] for key in ("name", "arguments")} for call in calls]
            text = (message["content"] or "") + granite.MARKER + json.dumps(functions, ensure_ascii=False)
            message = {**message, "content": text}
        out.append(message)
    return out


def mistral_messages(messages: list[Message]) -> list[Message]:
    """Returns the messages with the reasoning of each of the assistant's turns as the first part of its content."""
    out = []
    for message in messages:
        if (reasoning := message.get("reasoning_content")) and message["role"] == "assistant":
            text = [{"type": "text", "text": message["content"]}] if message["content"] else []
            message = {**message, "content": [{"type": "thinking", "thinking": reasoning}, *text]}
        out.append(message)
    return out
