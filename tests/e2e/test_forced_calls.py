"""Forced calls of models that were never taught to call: tokens are drawn at random, and chat templates know nothing of tools."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.e2e.checkpoints import CHAT_TEMPLATE, make_model
from tests.e2e.node import Node

CITIES = ["Köln", 'a "b" }']
PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"enum": CITIES},
        "days": {"type": "array", "items": {"type": "integer", "minimum": 1, "maximum": 99}, "minItems": 1, "maxItems": 3},
        "where": {"type": "object", "properties": {"exact": {"type": "boolean"}}, "required": ["exact"]},
    },
    "required": ["city", "days", "where"],
}
WEATHER: Any = {"type": "function", "function": {"name": "get_weather", "description": "Rain?", "parameters": PARAMETERS}}
TOOLS: list[Any] = [WEATHER, {"type": "function", "function": {"name": "stop"}}]
NAMED: Any = {"type": "function", "function": {"name": "get_weather"}}
MESSAGES: list[Any] = [{"role": "user", "content": "hello"}]
# as some checkpoints have it: no system message, turns that alternate, and nothing of tools
STRICT_TEMPLATE = (
    "{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}{% endfor %}" + CHAT_TEMPLATE
)
MODELS = {"oak": CHAT_TEMPLATE, "elm": STRICT_TEMPLATE}


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    folder = tmp_path_factory.mktemp("forced")
    for seed, (name, template) in enumerate(MODELS.items()):
        made = make_model(folder / "models" / name, seed=seed, max_position_embeddings=8192)
        (made / "chat_template.jinja").write_text(template)
    with Node(folder, devices=["cpu=64MiB"], runner="null", null_step_ms=0.2) as running:
        yield running


def check(name: str, arguments: str) -> None:
    value = json.loads(arguments)
    if name == "stop":
        assert arguments == "{}"
        return
    assert name == "get_weather"
    assert list(value) == ["city", "days", "where"]
    assert value["city"] in CITIES
    assert all(1 <= day <= 99 for day in value["days"])
    assert list(value["where"]) == ["exact"]
    assert arguments == json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def streamed(client: openai.OpenAI, options: dict[str, Any]) -> tuple[list[tuple[str, str]], str, str]:
    """(calls, content, finish_reason); checks that each call's name comes first."""
    calls: list[tuple[str, list[str]]] = []
    content = reason = ""
    for chunk in client.chat.completions.create(**options, stream=True):
        (choice,) = chunk.choices
        content += choice.delta.content or ""
        for call in choice.delta.tool_calls or ():
            if call.function.name is not None:
                assert (call.index, call.type, call.function.arguments) == (len(calls), "function", "")
                calls.append((call.function.name, []))
            else:
                calls[call.index][1].append(call.function.arguments)
        reason = choice.finish_reason or reason
    return [(name, "".join(parts)) for name, parts in calls], content, reason


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_one_call(client: openai.OpenAI, model: str, choice: Any) -> None:
    for seed in range(3):
        options = {"model": model, "messages": MESSAGES, "tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False}
        options |= {"max_tokens": 400, "seed": seed, "temperature": 1.3}
        whole = client.chat.completions.create(**options).choices[0]
        assert whole.finish_reason == "tool_calls"
        (call,) = whole.message.tool_calls
        check(call.function.name, call.function.arguments)
        assert whole.message.content is None
        assert choice == "required" or call.function.name == "get_weather"
        assert streamed(client, options) == ([(call.function.name, call.function.arguments)], "", "tool_calls")


def test_several_calls(client: openai.OpenAI) -> None:
    """A model that draws at random may go on calling: then max_tokens ends it. The arguments of the last call may be cut; what is
    there of one without a name is content."""
    for seed in range(4):
        options: dict[str, Any] = {"model": "oak", "messages": MESSAGES, "tools": TOOLS, "tool_choice": "required"}
        options |= {"max_tokens": 600, "seed": seed, "temperature": 1.3}
        whole = client.chat.completions.create(**options).choices[0]
        calls = [(call.function.name, call.function.arguments) for call in whole.message.tool_calls]
        assert calls
        assert whole.finish_reason in ("tool_calls", "length")
        for name, arguments in calls if whole.finish_reason == "tool_calls" else calls[:-1]:
            check(name, arguments)
        assert streamed(client, options) == (calls, whole.message.content or "", whole.finish_reason)
        assert whole.finish_reason == "length" or not whole.message.content


@pytest.mark.parametrize("model", MODELS)
def test_an_agents_loop(client: openai.OpenAI, model: str) -> None:
    """What the client sends back is the answer's own message, and the results."""
    options: dict[str, Any] = {"model": model, "tools": TOOLS, "max_tokens": 400, "seed": 5}
    messages: list[Any] = [*MESSAGES]
    for _ in range(3):
        answer = client.chat.completions.create(**options, messages=messages, tool_choice=NAMED, parallel_tool_calls=False).choices[
            0
        ]
        messages.append(answer.message.model_dump())
        messages += [{"role": "tool", "tool_call_id": call.id, "content": "rain"} for call in answer.message.tool_calls]
        check("get_weather", answer.message.tool_calls[0].function.arguments)
    answer = client.chat.completions.create(**{**options, "max_tokens": 8}, messages=messages, tool_choice="none").choices[0]
    assert answer.message.tool_calls is None


def test_what_the_model_is_shown(node: Node) -> None:
    import urllib.request

    def prompt(model: str, **fields: Any) -> str:
        def post(path: str, body: dict[str, Any]) -> Any:
            request = urllib.request.Request(node.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
            with urllib.request.urlopen(request, timeout=30) as answer:
                return json.loads(answer.read())

        told = post("/tokenize", {"model": model, "messages": MESSAGES, **fields})
        text: str = post("/detokenize", {"model": model, "tokens": told["tokens"]})["prompt"]
        return text

    forced = {"tools": TOOLS, "tool_choice": "required"}
    assert '<|system|>These functions can be called:\n{"name": "get_weather", "description": "Rain?", ' in prompt("oak", **forced)
    assert "<|user|>These functions can be called:\n" in prompt("elm", **forced)
    assert "can be called" not in prompt("oak", tools=TOOLS, tool_choice="none")
