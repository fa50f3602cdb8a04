"""Answers that follow a schema, from a served model with random weights: what ends is valid, what cannot be followed is a 400."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import jsonschema_rs
import openai
import pytest

from benchmarks.schemas import schema
from tests.e2e.chat import Stream
from tests.e2e.checkpoints import make_model
from tests.e2e.node import Node

NUM_SCHEMAS = 40
MODEL = "birch"


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    folder = tmp_path_factory.mktemp("structured")
    make_model(folder / "models" / MODEL, seed=3, max_position_embeddings=8192)
    with Node(folder, devices=["cpu=64MiB"], runner="torch", flags=["--dtype", "float32", "--threads", "1"]) as running:
        yield running


def wanted(made: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "made", "schema": made, "strict": True}}


def ask(node: Node, seed: int, **options: Any) -> Any:
    settings = {"max_tokens": 3000, "temperature": 1.3, "seed": seed, **options}
    with node.openai() as client:
        answer = client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": f"Say {seed}"}], **settings)
        return list(answer) if settings.get("stream") else answer


def test_everyday_schemas(node: Node) -> None:
    def one(seed: int) -> str:
        made = schema(seed)
        try:
            choice = ask(node, seed, response_format=wanted(made)).choices[0]
        except openai.BadRequestError as error:
            return "refused" if error.param == "response_format.json_schema.schema" else str(error)
        if choice.finish_reason == "length":
            return "length"
        value = json.loads(choice.message.content)
        kind = jsonschema.Draft202012Validator
        assert kind(made, format_checker=kind.FORMAT_CHECKER).is_valid(value), (seed, value)
        assert jsonschema_rs.Draft202012Validator(made, validate_formats=True).is_valid(value), (seed, value)
        return "valid"

    with ThreadPoolExecutor(12) as pool:
        results = list(pool.map(one, range(NUM_SCHEMAS)))
    assert set(results) <= {"valid", "refused", "length"}
    assert results.count("refused") <= NUM_SCHEMAS * 0.25, results
    assert results.count("length") <= NUM_SCHEMAS * 0.25, results
    assert results.count("valid") >= NUM_SCHEMAS * 0.6, results


def test_json_object(node: Node) -> None:
    choices = [ask(node, seed, response_format={"type": "json_object"}).choices[0] for seed in range(4)]
    for choice in choices:
        assert choice.message.content.startswith("{")
        if choice.finish_reason == "stop":
            assert isinstance(json.loads(choice.message.content), dict)


def test_streamed_is_what_the_whole_answer_is(node: Node) -> None:
    made = {"type": "object", "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 999}}, "required": ["a"]}
    options = {"response_format": wanted({**made, "additionalProperties": False})}
    whole = ask(node, 5, **options).choices[0]
    chunks = ask(node, 5, stream=True, **options)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.message.content
    assert chunks[-1].choices[0].finish_reason == whole.finish_reason == "stop"
    assert 0 <= json.loads(whole.message.content)["a"] <= 999


def test_stop_strings_cut_a_grammar_short(node: Node) -> None:
    choice = ask(node, 1, stop="7", extra_body={"regex": "[0-9]{400}"}).choices[0]
    assert choice.finish_reason == "stop"
    assert re.fullmatch("[0-689]*", choice.message.content)
    assert len(choice.message.content) < 400


def test_choices_and_lark(node: Node) -> None:
    for seed in range(3):
        assert ask(node, seed, extra_body={"guided_choice": ["yes", "no"]}).choices[0].message.content in ("yes", "no")
        answer = ask(node, seed, extra_body={"grammar": 'start: "is " NUMBER\nNUMBER: /[1-9][0-9]{0,3}/'})
        assert re.fullmatch("is [1-9][0-9]{0,3}", answer.choices[0].message.content)


@pytest.mark.parametrize(
    ("options", "param", "reason"),
    [
        ({"response_format": wanted({"type": "object", "not": {}})}, "response_format.json_schema.schema", "not"),
        ({"response_format": wanted({"type": "string", "pattern": "(?=a)"})}, "response_format.json_schema.schema", "look-ahead"),
        (
            {"response_format": wanted({"properties": {"a": {"const": 2**53 + 1}}})},
            "response_format.json_schema.schema",
            "schema: #/properties/a/const: 9007199254740993",
        ),
        ({"extra_body": {"regex": "(a"}}, "regex", "unclosed"),
        ({"extra_body": {"grammar": "start: nobody"}}, "grammar", "nobody"),
        ({"extra_body": {"grammar": "start: <|nobody|>"}}, "grammar", "nobody"),  # only the engine knows the vocabulary
    ],
)
def test_refused_by_name_and_reason(node: Node, options: dict[str, Any], param: str, reason: str) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        ask(node, 1, **options)
    assert error.value.param == param
    assert error.value.code == "unsupported_grammar"
    assert reason in error.value.message
    with pytest.raises(openai.BadRequestError):
        ask(node, 1, stream=True, **options)


def engine_pid(node: Node) -> int:
    return int(node.wait_for(lambda: int(node.json("status")["devices"][0]["pid"] or 0), "an engine"))


def test_a_killed_engine_changes_no_text(node: Node) -> None:
    def streams() -> list[Stream]:
        body = {"regex": "([a-z]{3,9} ){200}", "ignore_eos": False}
        return [Stream(node, MODEL, f"story {i}", 3000, temperature=1.0, seed=i, extra_body=body) for i in range(6)]

    undisturbed = [stream.join() for stream in streams()]
    for _ in range(4):
        disturbed = streams()
        for stream in disturbed:
            stream.wait_for_chunks(30)
        if any(stream.alive for stream in disturbed):
            break
        # on a busy machine all of them may have ended before this process sees their first chunks
    os.kill(engine_pid(node), signal.SIGKILL)
    for stream, expected in zip(disturbed, undisturbed, strict=True):
        assert stream.join().error == ""
        assert stream.text == expected.text
        assert re.fullmatch("([a-z]{3,9} ){200}", stream.text)
        assert stream.finish_reason == "stop"
