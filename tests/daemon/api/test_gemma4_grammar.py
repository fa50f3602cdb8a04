"""What forced and strict tools let a model write in Gemma 4's dialect."""

from __future__ import annotations

import json
from typing import Any

import pytest

from daemon.api.bodies.tools import AUTO, NAMED, REQUIRED, ToolRequest
from daemon.api.generation.call_rules import inexpressible
from daemon.api.generation.tool_grammar import argument_schemas
from daemon.text.tool_parsers.registry import GEMMA4
from tests.daemon.api.fakes import entry, serve, text_script
from tests.daemon.api.test_qwen3_coder_grammar import draws_calls
from tests.daemon.api.test_tool_grammar import Vocabulary
from tests.daemon.api.test_tools import ask, calls_of, put_together, stream
from tests.daemon.text.test_gemma4 import QUOTE, call

EDIT: dict[str, Any] = {
    "type": "object",
    "properties": {
        "path": {"type": "string", "description": "d", "maxLength": 12},
        "line": {"$ref": "#/$defs/line"},
        "kind": {"enum": ["a", 'b}, "']},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "inner": {"type": "object", "properties": {"deep": {"type": "array", "items": {"type": "boolean"}}}, "required": ["deep"]},
    },
    "required": ["path", "line"],
    "$defs": {"line": {"type": "integer", "minimum": 1, "maximum": 99}},
}
SCHEMAS = [json.dumps(EDIT).encode(), b'{"type": "object"}', b"{}"]
PLAIN, SPECIAL = Vocabulary([]), Vocabulary(["<|tool_call>", "<tool_call|>", QUOTE, "<|channel>", "<channel|>"])


def request(choice: str = REQUIRED, parallel: bool = True, strict: bool = True) -> ToolRequest:
    return ToolRequest(
        choice, parallel, ["edit", "any", "nothing"], SCHEMAS, [strict, False, True], "any" if choice == NAMED else ""
    )


LEAST = {"path": "a\nb <c>", "line": 3}
GOOD = call("edit", LEAST)
FULL = call("edit", LEAST | {"kind": 'b}, "', "note": None, "inner": {"deep": [True, False]}})
BAD = [
    call("edit", {"path": "a", "line": 100}),
    call("edit", {"path": "a"}),
    call("edit", {"path": "more than twelve", "line": 3}),
    call("edit", {"path": 5, "line": 3}),
    call("edit", LEAST | {"kind": "c"}),
    call("edit", LEAST | {"inner": {"deep": [1]}}),
    call("edit", LEAST | {"inner": {}}),
    call("edit", LEAST | {"other": "c"}),
    call("nothing", {"a": "b"}),
]


@pytest.mark.parametrize("words", [PLAIN, SPECIAL])
def test_calls_follow_their_schemas(words: Vocabulary) -> None:
    anything = call("any", {"x": 1, "y": [{"z": "a"}, None, {}]})
    for tools in (request(), request(AUTO)):
        for text in (GOOD, FULL, anything, call("nothing", {}), f"{GOOD}{anything}"):
            assert words.takes(GEMMA4, tools, text), text
        for text in BAD:
            assert not words.takes(GEMMA4, tools, text), text
    assert not words.takes(GEMMA4, request(), "Hello")
    assert not words.takes(GEMMA4, request(parallel=False), f"{GOOD}{GOOD}")
    assert words.takes(GEMMA4, request(NAMED), anything)
    assert not words.takes(GEMMA4, request(NAMED), GOOD)
    for text in ("", "Hello < there", f"Hello <b>{GOOD} and {FULL}."):
        assert words.takes(GEMMA4, request(AUTO), text), text
    assert not words.takes(GEMMA4, request(AUTO), f"Hello {BAD[0]}")
    assert words.takes(GEMMA4, request(AUTO, strict=False), BAD[0])
    if words is SPECIAL:
        assert words.takes(GEMMA4, request(AUTO), f"<|channel>thought\nhm<channel|>{GOOD}")


@pytest.mark.parametrize("words", [PLAIN, SPECIAL])
def test_whatever_a_model_draws_reads_as_calls(words: Vocabulary) -> None:
    draws_calls(GEMMA4, words, request())


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        (EDIT, None),
        ({"properties": {"a": {}}}, None),
        ({"properties": {"a": {"type": ["string", "integer"]}}}, None),
        ({"properties": {"a": {"oneOf": [{"type": "string"}, {"type": "integer"}]}}}, None),
        ({"properties": {"a": {"type": "array"}, "b": {"type": "object"}}}, None),
        ({"properties": {"a": {"type": "string", "pattern": "x"}}}, "properties.a.pattern"),
        (
            {"properties": {"a": {"$ref": "#/$defs/x"}}, "$defs": {"x": {"type": "string", "pattern": "x"}}},
            "properties.a.$ref.pattern",
        ),
        ({"properties": {"a": {"type": "array", "items": {"type": "string", "format": "date"}}}}, "properties.a.items.format"),
        ({"properties": {"a": {"type": "array", "items": {"type": "string"}, "minItems": 2}}}, "properties.a.minItems"),
        ({"properties": {"a": {"properties": {"b": {"enum": [1, "x"]}}, "type": "object"}}}, "properties.a.properties.b.enum"),
        ({"properties": {"a": {"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 2}]}}}, "properties.a.oneOf"),
        ({"properties": {"a": {"$ref": "#/$defs/x"}}, "$defs": {"x": {"$ref": "#/$defs/x"}}}, None),
        ({"properties": {"a": {"type": "string", "maxLength": 5000}}}, "properties.a.maxLength"),
        ({"properties": {"a b": {"type": "string"}}}, "properties.a b"),
        ({"properties": {"a": {"$ref": "#/$defs/x"}}}, "properties.a.$ref"),
        ({"anyOf": [{"type": "object"}]}, "anyOf"),
    ],
)
def test_what_cannot_be_held(schema: dict[str, Any], path: str | None) -> None:
    tools = ToolRequest(REQUIRED, True, ["f"], [json.dumps(schema).encode()], [False])
    found = inexpressible(GEMMA4, argument_schemas(tools))
    if schema.get("$defs") == {"x": {"$ref": "#/$defs/x"}}:
        assert found is not None
        assert found[1].endswith("nested too deeply")
    else:
        assert found == (None if path is None else (0, path))


async def test_a_chat() -> None:
    parameters = {"type": "object", "properties": {"path": {"type": "string"}, "line": {"type": "integer"}}}
    tool: dict[str, Any] = {"type": "function", "function": {"name": "edit", "parameters": parameters}}
    calls = [("edit", '{"path": "a", "line": 3}')]
    written = f"<|channel>thought\nHm.\n<channel|>So.\n{call('edit', {'path': 'a', 'line': 3})}"
    model = entry(tool_parser=GEMMA4, reasoning_parser="gemma4")
    async with serve(lambda _: text_script(written.encode()), models=[model]) as node:
        whole = await ask(node, tools=[tool])
        assert (whole.message.content, calls_of(whole.message), whole.finish_reason) == ("So.", calls, "tool_calls")
        assert whole.message.reasoning_content == "Hm."
        assert put_together(await stream(node, tools=[tool])) == ("So.", "Hm.", calls, "tool_calls")
