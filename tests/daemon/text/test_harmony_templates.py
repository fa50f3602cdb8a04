"""A chat template in the manner of gpt-oss: what it is given of messages, tools and variables."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from daemon.errors import BadRequest
from daemon.text.checkpoint_text import CheckpointText
from daemon.text.job_parts import rendered
from daemon.text.tool_parsers.harmony import MARKS
from daemon.text.tool_parsers.registry import HARMONY
from tests.daemon.text.tokenizers_made import byte_level, checkpoint

# like gpt-oss's it takes one call of a turn, its text or its reasoning, and one message of instructions
TEMPLATE = """\
{%- macro about(tool) %}
{{- '// ' + tool.description + '\\ntype ' + tool.name + ' = ' + (tool.parameters | default({}) | tojson) + ';\\n' }}
{%- endmacro %}
{{- '<|start|>system<|message|>' + (model_identity | default('A model.')) }}
{{- '\\nReasoning: ' + (reasoning_effort | default('medium')) }}
{%- for name in builtin_tools | default([]) %}{{- '\\n## ' + name }}{%- endfor %}
{{- '<|end|>' }}
{%- set ns = namespace(rest=messages, called=none) %}
{%- if messages[0].role in ('developer', 'system') or tools %}
{{- '<|start|>developer<|message|>' }}
{%- if messages[0].role in ('developer', 'system') %}{{- messages[0].content }}{%- set ns.rest = messages[1:] %}{%- endif %}
{%- if tools %}{{- '\\nnamespace functions {\\n' }}
{%- for tool in tools %}{{- about(tool.function) }}{%- endfor %}{{- '}' }}{%- endif %}
{{- '<|end|>' }}
{%- endif %}
{%- for message in ns.rest %}
{%- if message.role == 'assistant' and 'tool_calls' in message %}
{%- if message.content and message.thinking %}{{- raise_exception('both content and thinking') }}{%- endif %}
{%- set thought = message.content or message.thinking %}
{%- if thought %}{{- '<|start|>assistant<|channel|>analysis<|message|>' + thought + '<|end|>' }}{%- endif %}
{%- set ns.called = message.tool_calls[0].function.name %}
{{- '<|start|>assistant to=functions.' + ns.called + '<|channel|>commentary json<|message|>' }}
{{- message.tool_calls[0].function.arguments | tojson + '<|call|>' }}
{%- elif message.role == 'assistant' %}
{%- if loop.last and not add_generation_prompt and 'thinking' in message %}
{{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}
{%- endif %}
{{- '<|start|>assistant<|channel|>final<|message|>' + message.content }}
{{- '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}
{%- elif message.role == 'tool' %}
{%- if ns.called is none %}{{- raise_exception('no call before the result') }}{%- endif %}
{{- '<|start|>functions.' + ns.called + ' to=assistant<|channel|>commentary<|message|>' + message.content | tojson + '<|end|>' }}
{%- elif message.role == 'user' %}{{- '<|start|>user<|message|>' + message.content + '<|end|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"""
SYSTEM = "<|start|>system<|message|>A model.\nReasoning: medium<|end|>"
USER = {"role": "user", "content": "hi"}
HI = "<|start|>user<|message|>hi<|end|>"
GO = "<|start|>assistant"


def call(name: str, call_id: str = "") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": '{"q": 1}'}}


def called(name: str) -> str:
    return f'<|start|>assistant to=functions.{name}<|channel|>commentary json<|message|>{{"q": 1}}<|call|>'


def result(name: str, text: str) -> str:
    return f'<|start|>functions.{name} to=assistant<|channel|>commentary<|message|>"{text}"<|end|>'


def thought(text: str) -> str:
    return f"<|start|>assistant<|channel|>analysis<|message|>{text}<|end|>"


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> CheckpointText:
    tokenizer = byte_level()
    tokenizer.add_special_tokens(list(MARKS))
    folder = checkpoint(tmp_path_factory.mktemp("harmony"), tokenizer, chat_template=TEMPLATE)
    return CheckpointText("m", str(folder), None)


def shown(text: CheckpointText, messages: list[Any], tools: list[Any] | None = None, **options: Any) -> str:
    packed = {"tools": json.dumps(tools).encode() if tools else b"", "kwargs": msgspec.msgpack.encode(options.pop("kwargs", {}))}
    return rendered(text, msgspec.msgpack.encode(messages), packed | options)


def test_facts(text):
    facts = text.facts()
    assert (facts.tool_parser, facts.reasoning_parser) == (HARMONY, HARMONY)
    tokenizer = text.tokenizer()
    assert facts.harmony_marks == {tokenizer.token_to_id(name): mark for name, mark in MARKS.items()}


SAID = {"role": "assistant", "content": "Four.", "reasoning_content": "Hm."}
RESULTS = [
    {"role": "tool", "content": "two", "tool_call_id": "2"},
    {"role": "tool", "content": "one", "tool_call_id": "1"},
]
BOTH = {"role": "assistant", "content": None, "reasoning_content": "Hm.", "tool_calls": [call("a", "1"), call("b", "2")]}
UNNAMED = [{"role": "tool", "content": "one"}, {"role": "tool", "content": "two"}]
IN_TURN = thought("Hm.") + called("a") + result("a", "one") + called("b") + result("b", "two")
HISTORIES = {
    "an answer": ([USER, SAID, USER], HI + "<|start|>assistant<|channel|>final<|message|>Four.<|end|>" + HI),
    "a call": ([USER, {**BOTH, "tool_calls": [call("a")]}, UNNAMED[0]], HI + thought("Hm.") + called("a") + result("a", "one")),
    "text beside a call": (
        [USER, {"role": "assistant", "content": "I look.", "tool_calls": [call("a")]}, UNNAMED[0]],
        HI + thought("I look.") + called("a") + result("a", "one"),
    ),
    "text and reasoning beside a call": (
        [USER, {**BOTH, "content": "I look.", "tool_calls": [call("a")]}, UNNAMED[0]],
        HI + thought("Hm.\n\nI look.") + called("a") + result("a", "one"),
    ),
    "two calls": ([USER, BOTH, *RESULTS], HI + IN_TURN),
    "two calls, results by order": ([USER, BOTH, *UNNAMED], HI + IN_TURN),
    "two calls, one result": ([USER, BOTH, RESULTS[0]], HI + thought("Hm.") + called("a") + called("b") + result("b", "two")),
    "instructions": (
        [{"role": "system", "content": "Be"}, {"role": "developer", "content": "kind."}, USER],
        "<|start|>developer<|message|>Be\n\nkind.<|end|>" + HI,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HISTORIES)
def test_histories(text, name):
    messages, expected = HISTORIES[name]
    assert shown(text, messages) == SYSTEM + expected + GO


def test_a_continued_answer_comes_with_its_reasoning(text):
    told = shown(text, [USER, SAID], continue_final_message=True, add_generation_prompt=False)
    assert told == SYSTEM + HI + thought("Hm.") + "<|start|>assistant<|channel|>final<|message|>Four."


def test_tools_need_no_description(text):
    tools = [{"type": "function", "function": {"name": "a"}}, {"type": "function", "function": {"name": "b", "description": "B"}}]
    told = shown(text, [USER], tools)
    assert "namespace functions {\n// \ntype a = {};\n// B\ntype b = {};\n}" in told


@pytest.mark.parametrize(
    ("effort", "told"), [("low", "low"), ("high", "high"), ("none", "low"), ("minimal", "low"), ("xhigh", "high"), ("odd", "odd")]
)
def test_variables(text, effort, told):
    kwargs = {"reasoning_effort": effort, "model_identity": "I.", "builtin_tools": ["browser", "python"]}
    assert shown(text, [USER], kwargs=kwargs).startswith(
        f"<|start|>system<|message|>I.\nReasoning: {told}\n## browser\n## python<|end|>"
    )


def test_what_the_template_refuses(text):
    with pytest.raises(BadRequest, match="no call before the result"):
        shown(text, [USER, UNNAMED[0]])
