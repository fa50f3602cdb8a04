"""Anthropic's official client against a real node: text, forced calls and their results, streams, token counts, errors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from tests.e2e.checkpoints import make_model
from tests.e2e.node import Node

CITIES = ["Köln", 'a "b" }']
WEATHER: Any = {
    "name": "get_weather",
    "description": "Rain?",
    "input_schema": {"type": "object", "properties": {"city": {"enum": CITIES}}, "required": ["city"]},
}
HELLO: list[Any] = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    folder = tmp_path_factory.mktemp("messages")
    for name in ("ash", "elm", "oak", "org/yew"):
        make_model(folder / "models" / name, seed=3)
    with Node(folder, devices=["cpu=64MiB"], runner="null", null_step_ms=0.2) as running:
        yield running


@pytest.fixture(scope="module")
def client(node: Node) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=node.url, api_key="unused", max_retries=0) as opened:
        yield opened


def ask(client: anthropic.Anthropic, stream: bool, **options: Any) -> Any:
    options = {"model": "oak", "max_tokens": 16, "messages": HELLO} | options
    if not stream:
        return client.messages.create(**options)
    with client.messages.stream(**options) as events:
        return events.get_final_message()


@pytest.mark.parametrize("stream", [False, True])
def test_text(client: anthropic.Anthropic, stream: bool) -> None:
    told = ask(client, stream, system="Be brief.", extra_body={"temperature": 0.7})
    assert (told.type, told.role, told.model) == ("message", "assistant", "oak")
    assert told.stop_reason in ("max_tokens", "end_turn")
    assert [block.type for block in told.content] == ["text"]
    counted = client.messages.count_tokens(model="oak", system="Be brief.", messages=HELLO)
    usage = told.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == counted.input_tokens > 2
    assert 1 <= usage.output_tokens <= 16


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "get_weather"}])
def test_forced_calls_and_their_results(client: anthropic.Anthropic, stream: bool, choice: Any) -> None:
    asked: dict[str, Any] = {"tools": [WEATHER], "tool_choice": choice | {"disable_parallel_tool_use": True}}
    told = ask(client, stream, max_tokens=500, **asked)
    (call,) = told.content
    assert (told.stop_reason, call.type, call.name) == ("tool_use", "tool_use", "get_weather")
    assert call.input["city"] in CITIES
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "rain"}
    messages = [*HELLO, {"role": "assistant", "content": told.content}, {"role": "user", "content": [result]}]
    assert ask(client, stream, messages=messages, tools=[WEATHER], tool_choice={"type": "none"}).role == "assistant"


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_follows_a_schema(client: anthropic.Anthropic, stream: bool) -> None:
    schema = {"type": "object", "properties": {"sure": {"type": "boolean"}}, "required": ["sure"], "additionalProperties": False}
    told = ask(client, stream, max_tokens=200, output_config={"format": {"type": "json_schema", "schema": schema}})
    assert isinstance(json.loads(told.content[0].text)["sure"], bool)


@pytest.mark.parametrize("stream", [False, True])
def test_without_an_answer_a_prompt_is_cached(client: anthropic.Anthropic, stream: bool) -> None:
    asked: dict[str, Any] = {
        "messages": [{"role": "user", "content": f"{stream}: " + "words " * 50}],
        "tools": [WEATHER],
        "tool_choice": {"type": "any"},
    }
    told = ask(client, stream, max_tokens=0, **asked)
    assert (told.stop_reason, told.usage.output_tokens) == ("max_tokens", 0)
    assert not any(block.type != "text" or block.text for block in told.content)
    assert ask(client, stream, **asked).usage.cache_read_input_tokens > 200


def test_errors_are_the_clients_own(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError):
        ask(client, False, model="nobody")
    bad = WEATHER | {"input_schema": {"type": "object", "properties": {"city": {"type": "nonsense"}}}}
    with pytest.raises(anthropic.BadRequestError, match=r"tools\[0\]\.input_schema"):
        ask(client, True, tools=[bad], tool_choice={"type": "any"})


def test_models_come_in_pages(client: anthropic.Anthropic) -> None:
    def told(**query: Any) -> tuple[list[str], bool | None, str | None, str | None]:
        page = client.models.list(**query)
        return [model.id for model in page.data], page.has_more, page.first_id, page.last_id

    assert [model.id for model in client.models.list(limit=1)] == ["ash", "elm", "oak", "org/yew"]
    assert [model.id for model in client.models.list(limit=2, before_id="org/yew")] == ["elm", "oak", "ash"]
    assert told() == (["ash", "elm", "oak", "org/yew"], False, "ash", "org/yew")
    assert told(limit=2, after_id="ash") == (["elm", "oak"], True, "elm", "oak")
    assert told(limit=2, after_id="elm") == (["oak", "org/yew"], False, "oak", "org/yew")
    assert told(limit=2, before_id="org/yew") == (["elm", "oak"], True, "elm", "oak")
    assert told(limit=5, before_id="elm") == (["ash"], False, "ash", "ash")
    assert told(after_id="org/yew") == ([], False, None, None)
    assert told(before_id="ash") == ([], False, None, None)


@pytest.mark.parametrize(
    ("query", "says"),
    [
        *[({"limit": limit}, "limit: must be a whole number from 1 to 1000") for limit in (0, -1, 1001, 1.5, "", "²", "9" * 5000)],
        ({"after_id": "nobody"}, "after_id: names nothing in the list"),
        ({"before_id": ""}, "before_id: names nothing in the list"),
        ({"after_id": "ash", "before_id": "oak"}, "before_id: goes without after_id"),
    ],
)
def test_pages_that_cannot_be(client: anthropic.Anthropic, query: dict[str, Any], says: str) -> None:
    with pytest.raises(anthropic.BadRequestError) as caught:
        client.models.list(extra_query=query)
    assert caught.value.body == {"type": "error", "error": {"type": "invalid_request_error", "message": says}}
