"""Chat templates that know no tools, or not all there is to them: what the model is shown all the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from daemon.errors import BadRequest
from daemon.text.checkpoint_text import CheckpointText
from daemon.text.job_parts import rendered
from tests.daemon.text.tokenizers_made import CHATML, byte_level, checkpoint

LLAMA2 = """\
{% if messages[0].role == 'system' %}{% set system = messages[0].content | trim %}{% set messages = messages[1:] %}{% endif %}
{% for message in messages %}{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('roles must alternate user/assistant') }}{% endif %}
{% if message.role == 'user' %}[INST] {% if loop.first and system %}<<SYS>>{{ system }}<</SYS>>{% endif %}
{{ message.content | trim }} [/INST]{% else %} {{ message.content | trim }}</s>{% endif %}{% endfor %}"""
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + LLAMA2
DROPS_SYSTEM = "{% for message in messages if message.role != 'system' %}<{{ message.role }}>{{ message.content }}{% endfor %}"
CLOCK = CHATML + "{{ strftime_now('%f') }}"
TOOLS_IN_ITS_WAY = CHATML + "{% for tool in tools or [] %}!{{ tool.function.name }}{% endfor %}"
SAYS_TOOLS = CHATML + "{% if tools %}You have tools.{% endif %}"
NO_TOOLS = "{% if tools %}{{ raise_exception('no tools') }}{% endif %}" + CHATML
CALLS_IN_ITS_WAY = """\
{% for message in messages %}<{{ message.role }}>{{ message.content }}
{% for call in message.tool_calls or [] %}!{{ call.function.name }}{{ call.function.arguments | tojson }}{% endfor %}{% endfor %}"""
RESULTS_ONLY = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string", "description": "größte\nzuerst"}}}
WEATHER: Any = {
    "type": "function",
    "function": {"name": "get_weather", "description": "d", "parameters": PARAMETERS, "strict": True},
}
TOOLS = [WEATHER, {"type": "function", "function": {"name": "search"}}]
ANY, ONE, NAMED = {"name": "", "many": True}, {"name": "", "many": False}, {"name": "search", "many": False}
USER = {"role": "user", "content": "Look."}
SYSTEM = {"role": "system", "content": "Be kind."}
SHOWN = (
    'These functions can be called:\n{"name": "get_weather", "description": "d", "parameters": '
    + json.dumps(PARAMETERS, ensure_ascii=False)
    + '}\n{"name": "search"}\n\n'
)


def call(name: str, arguments: Any, call_id: str = "c1") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


HISTORY: list[dict[str, Any]] = [
    USER,
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [call("get_weather", '{"city": "Köln", "n": [1, 2]}'), call("search", "", "c2")],
    },
    {"role": "tool", "content": "rain", "tool_call_id": "c1"},
    {"role": "tool", "content": "3 hits", "tool_call_id": "c2"},
]
PLAIN_CALLS = '{"name":"get_weather","arguments":{"city":"Köln","n":[1,2]}}\n{"name":"search","arguments":{}}'
PLAIN_RESULTS = "Result of get_weather: rain\n\nResult of search: 3 hits"


def render(folder: Path, template: str, messages: list[Any], forced: dict[str, Any] | None = None, tools: Any = TOOLS) -> str:
    if not folder.exists():
        checkpoint(folder, byte_level(), chat_template=template)
    options = {
        "add_generation_prompt": True,
        "tools": json.dumps(tools).encode() if forced else b"",
        "plain_calls": True,
        "forced": forced,
    }
    return rendered(CheckpointText("m", str(folder), None), msgspec.msgpack.encode(messages), options)


@pytest.mark.parametrize(
    ("forced", "told"),
    [
        (ANY, 'nothing else. Each call is one line of JSON:\n{"name":"NAME","arguments":{...}}'),
        (ONE, 'nothing else, as one line of JSON:\n{"name":"NAME","arguments":{...}}'),
        (NAMED, 'Answer with a call of search and nothing else, as one line of JSON:\n{"name":"search","arguments":{...}}'),
    ],
)
def test_tools_stand_in_the_system_message(tmp_path: Path, forced: dict[str, Any], told: str) -> None:
    text = render(tmp_path / "m", CHATML, [USER], forced)
    assert text.startswith("<|start|>system\n" + SHOWN)
    assert text.endswith(f"{told}<|end|>\n<|start|>user\nLook.<|end|>\n<|start|>assistant\n")
    assert "strict" not in text


def test_the_clients_own_system_message_stays_in_front(tmp_path: Path) -> None:
    text = render(tmp_path / "m", LLAMA2, [SYSTEM, USER], ANY)
    assert f"<<SYS>>Be kind.\n\n{SHOWN}" in text
    assert text.count("<<SYS>>") == 1


@pytest.mark.parametrize("template", [NO_SYSTEM, DROPS_SYSTEM])
def test_tools_stand_in_the_first_message_where_there_is_no_system_message(tmp_path: Path, template: str) -> None:
    text = render(tmp_path / "m", template, [USER, {"role": "assistant", "content": "ok"}, USER], ANY)
    assert text.count(SHOWN) == 1
    assert text.index(SHOWN) < text.index("{...}}\n\nLook.") < text.index("ok")
    if template == DROPS_SYSTEM:
        assert SHOWN in render(tmp_path / "m", template, [SYSTEM, USER], ANY)
    else:
        with pytest.raises(BadRequest, match="no system role"):
            render(tmp_path / "m", template, [SYSTEM, USER], ANY)


@pytest.mark.parametrize("template", [CHATML, CLOCK, SAYS_TOOLS, NO_TOOLS])
def test_a_template_that_names_no_function_shows_none(tmp_path: Path, template: str) -> None:
    text = render(tmp_path / "m", template, [USER], ANY)
    assert SHOWN in text
    assert "You have tools" not in text


def test_a_template_that_shows_tools_in_its_own_way_is_left_alone(tmp_path: Path) -> None:
    text = render(tmp_path / "m", TOOLS_IN_ITS_WAY, [USER], ANY)
    assert "!get_weather!search" in text
    assert "can be called" not in text


@pytest.mark.parametrize("forced", [None, ANY])
@pytest.mark.parametrize("template", [CHATML, LLAMA2, RESULTS_ONLY])
def test_calls_and_results_become_text(tmp_path: Path, template: str, forced: dict[str, Any] | None) -> None:
    """LLAMA2 refuses the role of results, the others drop the calls."""
    text = render(tmp_path / "m", template, HISTORY, forced)
    assert text.count(PLAIN_CALLS) == 1
    assert text.count(PLAIN_RESULTS) == 1
    assert text.index("Look.") < text.index(PLAIN_CALLS) < text.index(PLAIN_RESULTS)
    assert "tool>" not in text
    assert (SHOWN in text) == (forced is not None)
    after = [{"role": "assistant", "content": "Rain."}, USER]
    assert "Rain." in render(tmp_path / "m", template, [*HISTORY, *after], forced)


def test_what_the_user_says_after_a_result_goes_with_it(tmp_path: Path) -> None:
    said = {"role": "assistant", "content": "Hm.", "tool_calls": [call("f", {"a": 1}, "")]}
    text = render(
        tmp_path / "m", CHATML, [USER, said, {"role": "function", "name": "f", "content": "1"}, {**USER, "content": "So?"}]
    )
    assert text == (
        '<|start|>user\nLook.<|end|>\n<|start|>assistant\nHm.\n\n{"name":"f","arguments":{"a":1}}<|end|>\n'
        "<|start|>user\nResult of f: 1\n\nSo?<|end|>\n<|start|>assistant\n"
    )


def test_arguments_that_are_no_json_stay_as_they_are(tmp_path: Path) -> None:
    said = {"role": "assistant", "content": None, "tool_calls": [call("f", '{"a": ')]}
    assert '{"name":"f","arguments":"{\\"a\\": "}' in render(tmp_path / "m", CHATML, [USER, said])


def test_a_template_that_shows_calls_in_its_own_way_is_left_alone(tmp_path: Path) -> None:
    text = render(tmp_path / "m", CALLS_IN_ITS_WAY, HISTORY)
    assert '!get_weather{"city": "Köln", "n": [1, 2]}!search{}' in text
    assert "<tool>rain" in text
    assert "Result of" not in text


def test_a_template_that_refuses_the_chat_itself_says_so(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="must alternate"):
        render(tmp_path / "m", LLAMA2, [USER, USER], ANY)
