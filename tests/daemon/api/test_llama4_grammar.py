"""What forced and strict tools let a model write in Llama 4's dialects: a list of calls as Python writes them, and JSON."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from daemon.api.bodies.tools import AUTO, NAMED, REQUIRED, ToolRequest
from daemon.api.generation.call_rules import inexpressible
from daemon.api.generation.tool_grammar import argument_schemas
from daemon.text.reply_parser import ReplyParser, parse_whole
from daemon.text.tool_parsers.llama4 import END, START
from daemon.text.tool_parsers.registry import LLAMA4_JSON, LLAMA4_PYTHONIC, tool_parser
from tests.daemon.api.fakes import entry, serve, text_script
from tests.daemon.api.test_qwen3_coder_grammar import draws_calls, request
from tests.daemon.api.test_tool_grammar import Vocabulary
from tests.daemon.api.test_tools import ask, calls_of, put_together, stream

PLAIN, SPECIAL = Vocabulary([]), Vocabulary([START, END])
DIALECTS = (LLAMA4_PYTHONIC, LLAMA4_JSON)


def calls(dialect: str, *each: tuple[str, dict[str, Any]]) -> str:
    """Returns calls as the grammar has them, of their names and arguments."""
    if dialect == LLAMA4_JSON:
        return "".join(f'{{"name": "{name}", "parameters": {_json(arguments)}}}' for name, arguments in each)
    written = (f"{name}({', '.join(f'{key}={_json(value)}' for key, value in arguments.items())})" for name, arguments in each)
    return f"[{', '.join(written)}]"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


@pytest.mark.parametrize("words", [PLAIN, SPECIAL])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_calls_follow_their_schemas(dialect: str, words: Vocabulary) -> None:
    good, full = {"path": "a\nb", "line": 3}, {"path": "", "line": 3, "kind": 'b</x> "', "note": None}
    texts = [calls(dialect, ("edit", good)), calls(dialect, ("edit", full)), calls(dialect, ("edit", good | {"note": "é"}))]
    texts += [calls(dialect, ("any", {"x": 1, "y": {"z": [True]}})), calls(dialect, ("any", {})), calls(dialect, ("nothing", {}))]
    two = calls(dialect, ("edit", good), ("nothing", {}), ("any", {"x": "1"}))
    bad = [
        calls(dialect, ("edit", {"path": "a", "line": 100})),
        calls(dialect, ("edit", {"path": "a"})),
        calls(dialect, ("edit", {"path": "more than twelve", "line": 3})),
        calls(dialect, ("edit", good | {"kind": "c"})),
        calls(dialect, ("edit", good | {"other": "c"})),
        calls(dialect, ("nothing", {"a": "b"})),
        calls(dialect, ("other", {})),
        calls(LLAMA4_JSON if dialect == LLAMA4_PYTHONIC else LLAMA4_PYTHONIC, ("edit", good)),
    ]
    for tools in (request(), request(AUTO)):
        for text in (*texts, two):
            assert words.takes(dialect, tools, text), text
        for text in bad:
            assert not words.takes(dialect, tools, text), text
    assert not words.takes(dialect, request(), "Hello")
    assert not words.takes(dialect, request(), f"{START}{texts[0]}{END}")
    assert words.takes(dialect, request(parallel=False), texts[0])
    assert not words.takes(dialect, request(parallel=False), two)
    assert words.takes(dialect, request(NAMED), texts[3])
    assert not words.takes(dialect, request(NAMED), texts[0])
    for text in ("", "Hello [there]", f"So: {bad[0]}"):
        assert words.takes(dialect, request(AUTO), text), text
    between = (f"{START}{texts[0]}{END}", f"Look.\n{START}{texts[0]}", f"{START}Look.{END}{texts[0]}", f"{START}print('x'){END}")
    for text in between:
        assert words.takes(dialect, request(AUTO), text) == (words is SPECIAL), text
        assert not words.takes(dialect, request(AUTO), text.replace(texts[0], bad[0]).replace("print('x')", bad[0])), text
    assert words.takes(dialect, request(AUTO, strict=False), bad[0])


def test_a_marker_that_is_spelled_is_no_text() -> None:
    """The parser would take it for the token, and what follows for a call."""
    ids = [each for char in START for each in SPECIAL.tokenizer.encode(char, add_special_tokens=False).ids]
    for spelled, is_taken in ((ids, False), (ids[:-1], True)):
        matcher = SPECIAL.matcher(LLAMA4_PYTHONIC, request(AUTO))
        assert (matcher.try_consume_tokens([*SPECIAL.tokenizer.encode("So ").ids, *spelled]) == len(spelled) + 3) == is_taken


@pytest.mark.parametrize("dialect", DIALECTS)
def test_whatever_a_model_draws_reads_as_calls(dialect: str) -> None:
    draws_calls(dialect, SPECIAL)


PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "flag": {"type": "boolean"},
        "gone": {"type": "null"},
        "yes": {"const": True},
        "day": {"type": "string", "pattern": "^[0-9]{4}/[0-9]{2}$"},
        "ids": {"type": "array", "items": {"$ref": "#/$defs/id"}},
        "some": {"anyOf": [{"type": "string"}, {"type": "integer"}]},
        "free": True,
    },
    "required": ["day"],
    "$defs": {"id": {"type": "integer"}},
}


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ('day="2024/01"', {"day": "2024/01"}),
        ('flag=True, gone=None, yes=true, day="2024/01"', {"flag": True, "gone": None, "yes": True, "day": "2024/01"}),
        ('flag=False, day="2024/01", ids=[1,2], some=3', {"flag": False, "day": "2024/01", "ids": [1, 2], "some": 3}),
        ('day="2024/01", some="x", free={"a":null}', {"day": "2024/01", "some": "x", "free": {"a": None}}),
        ("flag=True", None),
        ('flag=true, day="2024/01"', None),
        ('day="2024"', None),
        ('day="2024/01", ids=["1"]', None),
        ('day="2024/01", flag=True', None),
        ('day="2024/01",some=1', None),
        ('day="2024/01", ', None),
    ],
)
def test_values(written: str, arguments: dict[str, Any] | None) -> None:
    tools = ToolRequest(REQUIRED, True, ["f"], [json.dumps(PARAMETERS).encode()], [False])
    text = f"[f({written})]"
    assert PLAIN.takes(LLAMA4_PYTHONIC, tools, text) == (arguments is not None)
    if arguments is not None:
        reply = parse_whole(ReplyParser(tool_parser(LLAMA4_PYTHONIC, tools.names), None), text, cut=False)
        assert [json.loads(each) for _, each in reply.calls] == [arguments]


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        (PARAMETERS, None),
        ({"properties": {"a-b.é$": {"type": "string"}}}, None),
        ({"properties": {"a b": {"type": "string"}}}, "properties.a b"),
        ({"properties": {"a=": {"type": "string"}}}, "properties.a="),
        ({"properties": {"a": False}}, "properties.a"),
        ({"minProperties": 1}, "minProperties"),
    ],
)
def test_what_cannot_be_held(schema: dict[str, Any], path: str | None) -> None:
    tools = ToolRequest(REQUIRED, True, ["f"], [json.dumps(schema).encode()], [False])
    assert inexpressible(LLAMA4_PYTHONIC, argument_schemas(tools)) == (None if path is None else (0, path))


async def test_a_chat() -> None:
    tool: dict[str, Any] = {"type": "function", "function": {"name": "edit", "parameters": {"properties": {"path": {}}}}}
    found = [("edit", '{"path": "a"}'), ("edit", "{}")]
    reply = f"So.\n{START}[edit(path='a'), edit()]{END}"
    async with serve(lambda _: text_script(reply.encode()), models=[entry(tool_parser=LLAMA4_PYTHONIC)]) as node:
        whole = await ask(node, tools=[tool])
        assert (whole.message.content, calls_of(whole.message), whole.finish_reason) == ("So.", found, "tool_calls")
        assert put_together(await stream(node, tools=[tool])) == ("So.", "", found, "tool_calls")
        await ask(node, tools=[tool], tool_choice="required")
        assert '"edit(" first_0_0' in node.requests.submitted[-1].params.grammar
        odd = {"type": "function", "function": {"name": "edit", "parameters": {"properties": {"a b": {}}}}}
        await ask(node, tools=[odd], tool_choice="required")
        assert '{\\"name\\":\\"edit\\",' in node.requests.submitted[-1].params.grammar, "it is written in hearthd's own dialect"
        schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}
        with pytest.raises(openai.BadRequestError, match="cannot follow both"):
            await ask(node, tools=[tool], response_format=schema)
