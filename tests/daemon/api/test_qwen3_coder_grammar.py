"""What forced and strict tools let a model write in Qwen3-Coder's dialect, and in Seed-OSS's."""

from __future__ import annotations

import json
import random
from typing import Any

import openai
import pytest

from daemon.api.bodies.tools import AUTO, NAMED, REQUIRED, ToolRequest
from daemon.api.generation.call_rules import inexpressible
from daemon.api.generation.tool_grammar import argument_schemas
from daemon.text.reply_parser import ReplyParser, parse_whole
from daemon.text.tool_parsers.registry import QWEN3_CODER, SEED_OSS, tool_parser
from tests.daemon.api.fakes import entry, serve, text_script
from tests.daemon.api.test_tool_grammar import Vocabulary
from tests.daemon.api.test_tools import ask, calls_of, put_together, stream
from tests.daemon.text.test_qwen3_coder import seeded

EDIT: dict[str, Any] = {
    "type": "object",
    "properties": {
        "path": {"type": "string", "description": "d", "maxLength": 12},
        "line": {"$ref": "#/$defs/line"},
        "kind": {"enum": ["a", 'b</x> "']},
        "note": {"type": ["string", "null"]},
    },
    "required": ["path", "line"],
    "$defs": {"line": {"type": "integer", "minimum": 1, "maximum": 99}},
}
SCHEMAS = [json.dumps(EDIT).encode(), b'{"type": "object"}', b"{}"]
SEEDS = Vocabulary(["<seed:tool_call>", "</seed:tool_call>", "<seed:think>", "</seed:think>"])
PLAIN, SPECIAL = Vocabulary([]), Vocabulary(["<tool_call>", "</tool_call>"])


def request(choice: str = REQUIRED, parallel: bool = True, strict: bool = True) -> ToolRequest:
    return ToolRequest(
        choice, parallel, ["edit", "any", "nothing"], SCHEMAS, [strict, False, True], "any" if choice == NAMED else ""
    )


def call(name: str, *parameters: tuple[str, str]) -> str:
    written = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters)
    return f"<tool_call>\n<function={name}>\n{written}</function>\n</tool_call>"


GOOD = call("edit", ("path", "a\nb <c>"), ("line", "3"))
FULL = call("edit", ("path", ""), ("line", "3"), ("kind", 'b</x> "'), ("note", "null"))
BAD = [
    call("edit", ("path", "a"), ("line", "100")),
    call("edit", ("path", "a")),
    call("edit", ("path", "more than twelve"), ("line", "3")),
    call("edit", ("path", "a"), ("line", "3"), ("kind", "c")),
    call("edit", ("path", "a"), ("line", "3"), ("other", "c")),
    call("nothing", ("a", "b")),
]


@pytest.mark.parametrize("words", [PLAIN, SPECIAL])
def test_calls_follow_their_schemas(words: Vocabulary) -> None:
    anything = call("any", ("x", "1"), ("y", "\n\n"))
    for tools in (request(), request(AUTO)):
        for text in (GOOD, FULL, anything, call("nothing"), f"{GOOD}\n{anything}"):
            assert words.takes(QWEN3_CODER, tools, text), text
        for text in BAD:
            assert not words.takes(QWEN3_CODER, tools, text), text
    assert not words.takes(QWEN3_CODER, request(), "Hello")
    assert not words.takes(QWEN3_CODER, request(parallel=False), f"{GOOD}\n{GOOD}")
    assert words.takes(QWEN3_CODER, request(NAMED), anything)
    assert not words.takes(QWEN3_CODER, request(NAMED), GOOD)
    for text in ("", "Hello < there", f"Hello <b>{GOOD} and {FULL}."):
        assert words.takes(QWEN3_CODER, request(AUTO), text), text
    for text in (f"Hello {BAD[0]}", BAD[0].removeprefix("<tool_call>\n"), f"a <function=b>{GOOD}"):
        assert not words.takes(QWEN3_CODER, request(AUTO), text), text
    assert words.takes(QWEN3_CODER, request(AUTO, strict=False), BAD[0])


@pytest.mark.parametrize("words", [PLAIN, SEEDS])
def test_seed_oss(words: Vocabulary) -> None:
    for tools in (request(), request(AUTO)):
        for text in (GOOD, FULL, call("nothing"), f"{GOOD}\n{FULL}"):
            assert words.takes(SEED_OSS, tools, seeded(text)), seeded(text)
        for text in BAD:
            assert not words.takes(SEED_OSS, tools, seeded(text)), seeded(text)
    assert words.takes(SEED_OSS, request(AUTO), f"Hello <b>{seeded(GOOD)} and {seeded(FULL)}.")
    draws_calls(SEED_OSS, words)
    if words is SEEDS:
        assert words.takes(SEED_OSS, request(AUTO), f"<seed:think>hm</seed:think>{seeded(GOOD)}")


def draws_calls(dialect: str, words: Vocabulary, tools: ToolRequest | None = None) -> None:
    """Asserts that whatever a model draws under the grammar of a dialect reads as calls that follow their schemas. tools: a request
    with the function `edit` first; None: the one of this file."""
    tools = tools or request()
    kinds = json.loads(tools.schemas[0])["properties"]["kind"]["enum"]
    rng, num_ended = random.Random(1), 0
    for _ in range(12):
        text = words.draw(dialect, tools, rng, limit=250)
        if text is None:
            continue
        num_ended += 1
        reply = parse_whole(ReplyParser(tool_parser(dialect, tools.names, tools.schemas), None), text, cut=False)
        assert reply.calls, text
        assert not reply.content
        for name, arguments in reply.calls:
            value: Any = json.loads(arguments)
            if name == "edit":
                assert len(value["path"]) <= 12
                assert 1 <= value["line"] <= 99
                assert value.get("kind", "a") in kinds
    assert num_ended


@pytest.mark.parametrize("words", [PLAIN, SPECIAL])
def test_whatever_a_model_draws_reads_as_calls(words: Vocabulary) -> None:
    draws_calls(QWEN3_CODER, words)


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        (EDIT, None),
        ({"properties": {"a": {"type": "array", "items": {"type": "string", "pattern": "x"}}}}, None),
        ({"properties": {"a": {"anyOf": [{"type": "string"}, {"type": "null"}]}}}, None),
        ({"properties": {"a": {"type": "string", "pattern": "x"}}}, "properties.a.pattern"),
        ({"properties": {"a": {"type": "string", "format": "date"}}}, "properties.a.format"),
        ({"properties": {"a": {"$ref": "#/$defs/x"}}, "$defs": {"x": {"type": "string", "pattern": "x"}}}, "properties.a.pattern"),
        ({"properties": {"a": {"anyOf": [{"type": "string", "pattern": "x"}, {"type": "null"}]}}}, "properties.a.pattern"),
        ({"properties": {"a": {"type": ["string", "integer"]}}}, "properties.a: a string or something else"),
        ({"properties": {"a": {}}}, "properties.a: a string or something else"),
        ({"properties": {"a": {"type": "string", "maxLength": 5000}}}, "properties.a.maxLength"),
        ({"properties": {"a>": {"type": "string"}}}, "properties.a>"),
        ({"anyOf": [{"type": "object"}]}, "anyOf"),
    ],
)
def test_what_cannot_be_held(schema: dict[str, Any], path: str | None) -> None:
    tools = ToolRequest(REQUIRED, True, ["f"], [json.dumps(schema).encode()], [False])
    assert inexpressible(QWEN3_CODER, argument_schemas(tools)) == (None if path is None else (0, path))


async def test_a_chat() -> None:
    parameters = {"type": "object", "properties": {"path": {"type": "string"}, "line": {"type": "integer"}}}
    tool: dict[str, Any] = {"type": "function", "function": {"name": "edit", "parameters": parameters}}
    calls = [("edit", '{"path": "a", "line": 3}')]
    written = call("edit", ("path", "a"), ("line", "3"))
    async with serve(lambda _: text_script(f"So.\n{written}".encode()), models=[entry(tool_parser=QWEN3_CODER)]) as node:
        whole = await ask(node, tools=[tool])
        assert (whole.message.content, calls_of(whole.message), whole.finish_reason) == ("So.", calls, "tool_calls")
        assert put_together(await stream(node, tools=[tool])) == ("So.", "", calls, "tool_calls")


async def test_schemas_that_cannot_be_held_in_the_dialect() -> None:
    """Forced calls are written in hearthd's own, strict ones are refused."""
    parameters = {"type": "object", "properties": {"day": {"type": "string", "format": "date"}}}
    function: dict[str, Any] = {"name": "ask", "parameters": parameters}
    reply = '{"name":"ask","arguments":{"day":"2024-01-01"}}'
    async with serve(lambda _: text_script(reply.encode()), models=[entry(tool_parser=QWEN3_CODER)]) as node:
        whole = await ask(node, tools=[{"type": "function", "function": function}], tool_choice="required")
        assert calls_of(whole.message) == [("ask", '{"day":"2024-01-01"}')]
        with pytest.raises(openai.BadRequestError, match="leave strict out") as error:
            await ask(node, tools=[{"type": "function", "function": function | {"strict": True}}])
        assert error.value.param == "tools[0].function.parameters.properties.day.format"
