"""A chat template in the manner of Kimi K2's, which shows a call and its result by the id alone: the ids that it is given."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from daemon.text.checkpoint_text import CheckpointText
from daemon.text.job_parts import rendered
from daemon.text.reasoning import THINK
from daemon.text.tool_parsers.registry import KIMI_K2, NONE
from tests.daemon.text.test_reply_parser import numbered
from tests.daemon.text.tokenizers_made import byte_level, checkpoint

TEMPLATE = """\
{%- macro calls_of(message) %}
{{- '<|tool_calls_section_begin|>' }}
{%- for call in message.tool_calls %}
{{- '<|tool_call_begin|>' + call.id + '<|tool_call_argument_begin|>' }}
{{- (call.function.arguments | tojson) + '<|tool_call_end|>' }}
{%- endfor %}
{{- '<|tool_calls_section_end|>' }}
{%- endmacro %}
{%- if tools %}{{- '[tools]' + (tools | tojson) }}{%- endif %}
{%- for message in messages %}
{{- '[' + message.role + ']' }}
{%- if message.role == 'tool' %}{{- '## Return of ' + (message.tool_call_id | default('-')) + '\\n' }}{%- endif %}
{{- message.content }}
{%- if message.tool_calls %}{{- calls_of(message) }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '[assistant]' }}{%- endif %}"""
THINKING = (
    TEMPLATE + "{%- if thinking is defined and thinking is false %}{{- '<think></think>' }}{%- else %}{{- '<think>' }}{%- endif %}"
)
USER = {"role": "user", "content": "hi"}


def text_of(folder: Any, template: str) -> CheckpointText:
    tokenizer = byte_level()
    tokenizer.add_special_tokens(["<|tool_calls_section_begin|>", "<|tool_call_argument_begin|>"])
    return CheckpointText("m", str(checkpoint(folder, tokenizer, chat_template=template)), None)


def turn(*calls: tuple[str, str]) -> dict[str, Any]:
    """A turn with calls. A call: the function's name, and its id."""
    made = [{"id": each, "type": "function", "function": {"name": name, "arguments": '{"q": 1}'}} for name, each in calls]
    return {"role": "assistant", "content": None, "tool_calls": made}


def result(call_id: str | None, text: str = "ok") -> dict[str, Any]:
    return {"role": "tool", "content": text} | ({} if call_id is None else {"tool_call_id": call_id})


def shown(*ids: str) -> str:
    return "[assistant]" + numbered(*((each, '{"q": 1}') for each in ids))


HISTORIES = {
    "the model's ids": (
        [turn(("a", "functions.a:0"), ("b", "functions.b:1")), result("functions.a:0"), result("functions.b:1")],
        shown("functions.a:0", "functions.b:1") + "[tool]## Return of functions.a:0\nok[tool]## Return of functions.b:1\nok",
    ),
    "another model's ids": (
        [
            turn(("a", "call_x"), ("b", "call_y")),
            result("call_y", "y"),
            result("call_x", "x"),
            turn(("a", "call_x")),
            result("call_x"),
        ],
        shown("functions.a:0", "functions.b:1")
        + "[tool]## Return of functions.b:1\ny[tool]## Return of functions.a:0\nx"
        + shown("functions.a:2")
        + "[tool]## Return of functions.a:2\nok",
    ),
    "no ids": (
        [turn(("a", ""), ("b", "")), result(None, "1"), result("", "2"), result("z", "3")],
        shown("functions.a:0", "functions.b:1")
        + "[tool]## Return of functions.a:0\n1[tool]## Return of functions.b:1\n2[tool]## Return of z\n3",
    ),
    "a conversation whose start was left out": (
        [result("functions.a:6"), turn(("a", "functions.a:7")), result("functions.a:7"), turn(("b", "call_x")), result("call_x")],
        "[tool]## Return of functions.a:6\nok"
        + shown("functions.a:7")
        + "[tool]## Return of functions.a:7\nok"
        + shown("functions.b:8")
        + "[tool]## Return of functions.b:8\nok",
    ),
}


@pytest.mark.parametrize("name", HISTORIES)
def test_histories(tmp_path, name):
    messages, expected = HISTORIES[name]
    given = msgspec.msgpack.encode([USER, *messages])
    assert rendered(text_of(tmp_path / "m", TEMPLATE), given, {"tools": b""}) == "[user]hi" + expected + "[assistant]"


def test_facts(tmp_path):
    for template, reasoning in ((TEMPLATE, NONE), (THINKING, THINK)):
        facts = text_of(tmp_path / reasoning, template).facts()
        assert (facts.tool_parser, facts.reasoning_parser) == (KIMI_K2, reasoning)
        assert list(facts.markers.values()) == ["<|tool_calls_section_begin|>", "<|tool_call_argument_begin|>"]
