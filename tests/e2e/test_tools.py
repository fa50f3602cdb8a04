"""Forced and strict tools on a real node: engines draw whatever the grammar leaves, and clients read calls that fit the schema."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import openai
import pydantic
import pytest
from tokenizers import Tokenizer

from daemon.text.tool_parsers.harmony import MARKS
from tests.e2e.checkpoints import END_ID, make_model
from tests.e2e.node import Node

DIALECTS = ("hermes", "kimi_k2", "llama3", "mistral", "qwen3_coder")
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"enum": ["Köln", 'a "b" }']}, "days": {"type": "integer", "minimum": 1, "maximum": 99}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
EMPTY = {"type": "object", "properties": {}, "additionalProperties": False}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "stop", "parameters": EMPTY}},
]
MESSAGES: list[Any] = [{"role": "user", "content": "hello"}]
WEATHER: Any = {"type": "function", "function": {"name": "get_weather"}}


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    folder = tmp_path_factory.mktemp("tools")
    config = ""
    for seed, dialect in enumerate(DIALECTS):
        make_model(folder / "models" / dialect, seed=seed)
        config += f'[models.{dialect}]\ntool_parser = "{dialect}"\n'
    make_harmony(folder / "models" / "harmony")
    config += "[models.harmony]\nmax_model_len = 2048\n"
    with Node(folder, devices=["cpu:0=96MiB"], runner="null", null_step_ms=0.2, config=config) as running:
        yield running


def make_harmony(folder: Path) -> None:
    """A model whose tokenizer and template are in the manner of gpt-oss's, and whose end token is <|return|> alone."""
    make_model(folder, seed=7, vocab_size=272)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(list(MARKS))
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": tokenizer.token_to_id("<|return|>")}))
    (folder / "chat_template.jinja").write_text(
        "{% for message in messages %}{{ '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}{% endfor %}"
        "{{ tools }}{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}{# <|channel|> #}"
    )


def check(name: str, arguments: str) -> None:
    value = json.loads(arguments)
    if name == "stop":
        assert value == {}
    else:
        assert name == "get_weather"
        assert value["city"] in PARAMETERS["properties"]["city"]["enum"]  # type: ignore[index]
        assert 1 <= value["days"] <= 99
        assert len(value) == 2


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("choice", ["required", WEATHER], ids=["required", "named"])
def test_forced(client: openai.OpenAI, dialect: str, choice: Any) -> None:
    options: dict[str, Any] = {"model": dialect, "messages": MESSAGES, "tools": TOOLS, "tool_choice": choice, "max_tokens": 1500}
    for seed in range(3):
        whole = client.chat.completions.create(**options, seed=seed, parallel_tool_calls=False).choices[0]
        assert whole.finish_reason == "tool_calls"
        (call,) = whole.message.tool_calls
        check(call.function.name, call.function.arguments)
        assert whole.message.content is None
        if choice == WEATHER:
            assert call.function.name == "get_weather"
        parts: list[str] = []
        for chunk in client.chat.completions.create(**options, seed=seed, parallel_tool_calls=False, stream=True):
            parts += [each.function.arguments for each in chunk.choices[0].delta.tool_calls or ()]
        assert "".join(parts) == call.function.arguments


def test_harmony(client: openai.OpenAI) -> None:
    """Headers are written by the grammar, the analysis is the model's, and calls and answers follow their schemas."""
    options: dict[str, Any] = {"model": "harmony", "messages": MESSAGES, "max_tokens": 1500, "logit_bias": {str(END_ID): 4}}
    schema: Any = {"type": "json_schema", "json_schema": {"name": "n", "schema": PARAMETERS}}
    reasonings = []
    for seed in range(2):
        for fields in (
            {"tools": TOOLS, "tool_choice": "required"},
            {"tools": TOOLS, "tool_choice": WEATHER},
            {"response_format": schema},
        ):
            whole = client.chat.completions.create(**options, **fields, seed=seed).choices[0]
            message: Any = whole.message
            if "tools" in fields:
                assert (whole.finish_reason, message.content) == ("tool_calls", None)
                (call,) = message.tool_calls
                check(call.function.name, call.function.arguments)
            else:
                assert (whole.finish_reason, message.tool_calls) == ("stop", None)
                check("get_weather", message.content)
            reasonings.append(message.reasoning_content)
    assert any(reasonings)


class Weather(pydantic.BaseModel):
    """Asks for the weather."""

    city: Literal["Köln", "Bonn"]
    days: int


def test_the_clients_own_classes(client: openai.OpenAI) -> None:
    tools: Any = [openai.pydantic_function_tool(Weather)]
    assert tools[0]["function"]["strict"]
    answer = client.chat.completions.parse(
        model="mistral", messages=MESSAGES, tools=tools, tool_choice="required", parallel_tool_calls=False, max_tokens=1500
    )
    (call,) = answer.choices[0].message.tool_calls or ()
    assert isinstance(call.function.parsed_arguments, Weather)


def test_an_unsupported_schema_is_refused_by_name(client: openai.OpenAI) -> None:
    bad = {"type": "object", "properties": {"a": {"type": "string", "pattern": "(?=x)"}}}
    tools: list[Any] = [TOOLS[0], {"type": "function", "function": {"name": "g", "parameters": bad}}]
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(model="hermes", messages=MESSAGES, tools=tools, tool_choice="required")
    assert error.value.param == "tools[1].function.parameters"


def test_a_template_without_tools_has_no_dialect(node: Node, client: openai.OpenAI) -> None:
    make_model(node.models / "plain", seed=9)
    node.wait_for(lambda: "plain" in {model.id for model in client.models.list()}, "plain")
    with pytest.raises(openai.BadRequestError, match="tool_parser") as error:
        client.chat.completions.create(model="plain", messages=MESSAGES, tools=TOOLS)
    assert error.value.param == "tools"
    assert 'tool_choice "required"' in error.value.message


def test_tokens_of_a_chat_with_tools(node: Node) -> None:
    import urllib.request

    def post(path: str, body: dict[str, Any]) -> Any:
        request = urllib.request.Request(node.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.loads(answer.read())

    told = post("/m/hermes/tokenize", {"messages": MESSAGES, "return_token_strs": True})
    assert told["count"] == len(told["tokens"]) == len(told["token_strs"])
    assert "<|user|>hello<|end|>" in post("/detokenize", {"model": "hermes", "tokens": told["tokens"]})["prompt"]
