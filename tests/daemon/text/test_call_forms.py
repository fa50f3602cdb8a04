"""The forms in which chat templates expect earlier turns: calls as objects or as text, content that is none, and what they leave
out.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from daemon.errors import BadRequest
from daemon.text.call_form import CallForm, find_call_form
from daemon.text.chat_template import ChatTemplate
from daemon.text.tool_parsers.registry import DEEPSEEK_V3, DEEPSEEK_V31, detect_tools

EACH = "{% for message in messages %}<{{ message.role }}>"
CALLS = "{% for call in message.tool_calls or [] %}!{{ call.function.name }}"
END = "{% endfor %}{% endfor %}"
OBJECTS = EACH + "{{ message.content }}" + CALLS + "{{ call.function.arguments | tojson }}" + END
TEXTS = EACH + "{{ message.content }}" + CALLS + "{{ '=' + call.function.arguments }}" + END
EITHER = EACH + "{{ message.content }}" + CALLS + "{{ call.function.arguments }}" + END  # writes an object as Python does
ITEMS = EACH + CALLS + "{% for key, value in call.function.arguments.items() %}{{ key }}={{ value }};{% endfor %}" + END
# as DeepSeek's, which take any content for an answer
ANSWERS = EACH + CALLS + "{{ call.function.arguments | tojson }}{% endfor %}"
ANSWERS += "{% if message.content is not none %}({{ message.content }}){% endif %}{% endfor %}"
ONLY_BARE = EACH + "{% if message.tool_calls and message.content is none %}" + CALLS + "{{ '=' + call.function.arguments }}"
ONLY_BARE += "{% endfor %}{% else %}{{ message.content }}{% endif %}{% endfor %}"
STRICT = "{% if messages[-1].role == 'tool' %}{{ raise_exception('no') }}{% endif %}" + OBJECTS

USER = {"role": "user", "content": "hi"}
ARGUMENTS = '{"q": "é", "n": [1, 2.0]}'


def turn(content: str | None = None, **more: Any) -> dict[str, Any]:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": ARGUMENTS}}
    return {"role": "assistant", "content": content, "tool_calls": [call], **more}


def written(template: str, *messages: dict[str, Any], tools: list[dict[str, Any]] | None = None) -> str:
    return ChatTemplate(template, {}).render(list(messages), False, {}, tools)


@pytest.mark.parametrize(
    ("template", "form", "text"),
    [
        (OBJECTS, CallForm(), "<assistant>!f" + ARGUMENTS),
        (TEXTS, CallForm(as_text=True), "<assistant>!f=" + ARGUMENTS),
        (EITHER, CallForm(as_text=True), "<assistant>!f" + ARGUMENTS),
        (ITEMS, CallForm(), "<assistant>!fq=é;n=[1, 2.0];"),
        (ANSWERS, CallForm(no_content=True), "<assistant>!f" + ARGUMENTS),
        (ONLY_BARE, CallForm(as_text=True, no_content=True), "<assistant>!f=" + ARGUMENTS),
        (STRICT, CallForm(), "<assistant>!f" + ARGUMENTS),
        (EACH + "{{ message.content }}{% endfor %}", CallForm(), "<assistant>"),
    ],
)
def test_the_form_that_a_template_expects(template: str, form: CallForm, text: str) -> None:
    one = ChatTemplate(template, {})

    def plainly(messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> str:
        return one._write(messages, tools, {}, False)

    assert find_call_form(plainly) == form
    assert (
        written(template, USER, turn()) == "<user>" + ("(hi)" if template == ANSWERS else "hi" if template != ITEMS else "") + text
    )


def test_text_beside_a_call_stays() -> None:
    assert written(ANSWERS, turn("So.")) == f"<assistant>!f{ARGUMENTS}(So.)"


def test_a_template_that_always_fails_says_so() -> None:
    with pytest.raises(BadRequest, match="never"):
        written("{{ raise_exception('never') }}", turn())


GRANITE = "{% if tools %}Write <|tool_call|> and a list.{% endif %}" + EACH + "{{ message.content }}{% endfor %}"


def test_granites_calls_are_written_though_its_template_leaves_them_out() -> None:
    text = written(GRANITE, turn("So."), {"role": "tool", "content": "42"})
    assert text == '<assistant>So.<|tool_call|>[{"name": "f", "arguments": ' + ARGUMENTS + "}]<tool>42"


MISTRAL = EACH + "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
MISTRAL += (
    "{{ '[THINK]' + part.thinking + '[/THINK]' if part.type == 'thinking' else part.text }}{% endfor %}{% endif %}{% endfor %}"
)


def test_mistrals_template_gets_the_reasoning_in_the_content() -> None:
    answer = {"role": "assistant", "content": "Yes", "reasoning_content": "hm"}
    assert written(MISTRAL, USER, answer) == "<user>hi<assistant>[THINK]hm[/THINK]Yes"
    assert written(MISTRAL, {**answer, "content": ""}) == "<assistant>[THINK]hm[/THINK]"
    assert written(MISTRAL, {**answer, "role": "user"}) == "<user>Yes"


V31 = EACH + "{{ message.content }}" + CALLS + "{{ '<｜tool▁calls▁begin｜>' }}" + END
V3 = V31 + "{{ '\\n```json' if false }}"
TOOLS = [
    {"type": "function", "function": {"name": "f", "description": "D <é>", "parameters": {"type": "object", "z": 1}}},
    {"type": "function", "function": {"name": "g"}},
]


@pytest.mark.parametrize(
    ("template", "dialect", "form"),
    [
        (V31, DEEPSEEK_V31, "NAME<｜tool▁sep｜>ARGUMENTS"),
        (V3, DEEPSEEK_V3, "function<｜tool▁sep｜>NAME\n```json\nARGUMENTS\n```"),
    ],
)
def test_deepseeks_tools_are_told_where_the_template_does_not(template: str, dialect: str, form: str) -> None:
    assert detect_tools(template, "") == dialect
    text = written(template, USER, tools=TOOLS)
    begin, end = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>", "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    assert f"\n{begin}{form}{end}\n" in text
    assert '### f\nDescription: D <é>\n\nParameters: {"type": "object", "z": 1}\n\n### g\nDescription: \n\nParameters: {}\n' in text
    assert text.startswith("<system>## Tools\n")
    assert text.endswith("<user>hi")
    told = written(template, {"role": "system", "content": "Be kind."}, USER, tools=TOOLS)
    assert told == text.replace("<system>", "<system>Be kind.\n\n")
    assert written(template, USER) == "<user>hi"
    assert written(template + "{# tools #}", USER, tools=TOOLS) == "<user>hi", (
        "such a template shows them itself, or chooses not to"
    )


def test_tools_are_told_in_the_last_system_message() -> None:
    first, last = {"role": "system", "content": "One."}, {"role": "developer", "content": "Two."}
    text = written(V31, first, USER, last, tools=TOOLS)
    assert text.startswith("<system>One.<user>hi<system>Two.\n\n## Tools\n")
    assert json.dumps(TOOLS[0]["function"]["parameters"]) in text  # type: ignore[index]
