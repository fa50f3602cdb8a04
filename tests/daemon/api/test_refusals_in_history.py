"""Messages of the assistant that hold a refusal: what the template is given, and which ones are no messages."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from daemon.api.bodies.chat import parse
from daemon.errors import BadRequest

REFUSAL = {"type": "refusal", "refusal": "I won't."}
TEXT = {"type": "text", "text": "Hm."}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def packed(*messages: dict[str, Any]) -> list[dict[str, Any]]:
    _, prompt = parse(msgspec.json.encode({"model": "m", "messages": messages}))
    plain: list[dict[str, Any]] = msgspec.msgpack.decode(prompt)
    return plain


@pytest.mark.parametrize(
    ("fields", "content"),
    [
        ({"refusal": "I won't."}, "I won't."),
        ({"content": None, "refusal": "I won't."}, "I won't."),
        ({"content": "", "refusal": "I won't."}, "I won't."),
        ({"content": "Hm.", "refusal": "I won't."}, "Hm."),
        ({"content": "Hm.", "refusal": None}, "Hm."),
        ({"content": None, "refusal": None, "tool_calls": [CALL]}, None),
        ({"content": [REFUSAL]}, "I won't."),
        ({"content": [REFUSAL, REFUSAL]}, "I won't.\nI won't."),
        ({"content": [REFUSAL, TEXT]}, "Hm."),
        ({"content": [], "refusal": "I won't."}, "I won't."),
    ],
)
def test_a_refusal_is_what_the_assistant_said_where_it_said_nothing_else(fields: dict[str, Any], content: str | None) -> None:
    told, after = packed({"role": "assistant", **fields}, {"role": "user", "content": "x", "refusal": None})
    assert told["content"] == content
    assert "refusal" not in told
    assert after == {"role": "user", "content": "x"}


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "user", "content": "x", "refusal": "no"}, "messages[0].refusal"),
        ({"role": "user", "content": [REFUSAL]}, "messages[0].content[0].type"),
        ({"role": "tool", "content": [TEXT, REFUSAL]}, "messages[0].content[1].type"),
        ({"role": "assistant", "refusal": 1}, "messages[0].refusal"),
        ({"role": "assistant", "refusal": "a\0b"}, "messages[0].refusal"),
        ({"role": "assistant", "content": [{"type": "refusal"}]}, "messages[0].content[0].refusal"),
        ({"role": "assistant", "content": [{"type": "refusal", "refusal": 1}]}, "messages[0].content[0].refusal"),
        ({"role": "assistant", "content": [{"type": "refusal", "refusal": "a\0b"}]}, "messages[0].content"),
        ({"role": "assistant", "content": [{"type": "audio"}]}, "messages[0].content[0].type"),
    ],
)
def test_what_is_no_refusal_is_refused_by_name(message: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as error:
        packed(message)
    assert error.value.param == param
