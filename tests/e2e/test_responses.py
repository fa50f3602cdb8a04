"""OpenAI's official client and its responses against a real node: text, calls and their results, streams, conversations, errors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import openai
import pytest

from tests.e2e.checkpoints import make_model
from tests.e2e.node import Node

if TYPE_CHECKING:
    from openai.types.responses import Response

CITIES = ["Köln", 'a "b" }']
WEATHER: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "Rain?",
    "parameters": {"type": "object", "properties": {"city": {"enum": CITIES}}, "required": ["city"]},
    "strict": True,
}


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    folder = tmp_path_factory.mktemp("responses")
    make_model(folder / "models" / "oak", seed=3)
    with Node(folder, devices=["cpu=64MiB"], runner="null", null_step_ms=0.2) as running:
        yield running


@pytest.fixture(scope="module")
def client(node: Node) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{node.url}/v1", api_key="unused", max_retries=0) as opened:
        yield opened


def ask(client: openai.OpenAI, stream: bool, **options: Any) -> Response:
    options = {"model": "oak", "max_output_tokens": 16, "input": "hello"} | options
    if not stream:
        response: Response = client.responses.create(**options)
        return response
    with client.responses.stream(**options) as events:
        told = list(events)
    last: Any = told[-1]
    assert [event.sequence_number for event in told] == list(range(len(told)))  # type: ignore[union-attr]
    return last.response  # type: ignore[no-any-return]


@pytest.mark.parametrize("stream", [False, True])
def test_text(client: openai.OpenAI, stream: bool) -> None:
    told = ask(client, stream, instructions="Be brief.", temperature=0.7)
    assert (told.object, told.model, told.temperature, told.instructions) == ("response", "oak", 0.7, "Be brief.")
    assert told.status in ("incomplete", "completed")
    assert [item.type for item in told.output] == ["message"]
    assert told.usage is not None
    assert 1 <= told.usage.output_tokens <= 16
    assert told.usage.total_tokens == told.usage.input_tokens + told.usage.output_tokens
    assert client.responses.retrieve(told.id).output_text == told.output_text


@pytest.mark.parametrize("stream", [False, True])
def test_calls_and_their_results_go_on_from_what_is_kept(client: openai.OpenAI, stream: bool) -> None:
    first = ask(client, stream, tools=[WEATHER], tool_choice="required", parallel_tool_calls=False, max_output_tokens=500)
    (call,) = first.output
    assert call.type == "function_call"
    assert (call.name, call.status) == ("get_weather", "completed")
    assert json.loads(call.arguments)["city"] in CITIES
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    second = ask(client, stream, previous_response_id=first.id, input=[result])
    by_hand = ask(client, stream, input=[{"role": "user", "content": "hello"}, call.model_dump(exclude_none=True), result])
    assert second.usage is not None
    assert by_hand.usage is not None
    assert second.usage.input_tokens == by_hand.usage.input_tokens > 50
    assert second.previous_response_id == first.id


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_follows_a_schema(client: openai.OpenAI, stream: bool) -> None:
    schema = {"type": "object", "properties": {"sure": {"type": "boolean"}}, "required": ["sure"], "additionalProperties": False}
    wanted = {"type": "json_schema", "name": "answer", "schema": schema, "strict": True}
    told = ask(client, stream, max_output_tokens=200, text={"format": wanted})
    assert isinstance(json.loads(told.output_text)["sure"], bool)


def test_errors_are_the_clients_own(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        ask(client, False, model="nobody")
    bad = WEATHER | {"parameters": {"type": "object", "properties": {"city": {"type": "nonsense"}}}}
    with pytest.raises(openai.BadRequestError, match=r"tools\[0\]\.parameters"):
        ask(client, True, tools=[bad], tool_choice="required")
    with pytest.raises(openai.BadRequestError, match="previous_response_id"):
        ask(client, False, previous_response_id="resp_nobody")
