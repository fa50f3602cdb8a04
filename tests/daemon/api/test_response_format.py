"""Which grammar a body asks for, and which bodies are refused for it."""

from __future__ import annotations

import json

import aiohttp
import pytest

from daemon.api.bodies.completions import parse
from daemon.api.bodies.response_format import ANY_OBJECT, MAX_GRAMMAR_BYTES
from daemon.errors import BadRequest
from daemon.text.grammar_check import why_not
from engine.grammar.compile import compile_grammar
from tests.daemon.api.fakes import serve
from tests.daemon.api.openai_error import check_error

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
GOOD = {CHAT: {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}, TEXT: {"model": "tiny", "prompt": "hi"}}
SCHEMA = {"type": "object", "properties": {"b": {"type": "string"}, "a": {"type": "integer"}}}


def asked(**fields: object) -> tuple[str, str]:
    head, _ = parse(json.dumps({"prompt": "x", **fields}).encode())
    return head.grammar_field, head.grammar


def test_none() -> None:
    for value in (None, {"type": "text"}):
        assert asked(response_format=value) == ("", "")
    assert asked() == ("", "")


def test_response_format() -> None:
    assert asked(response_format={"type": "json_object"}) == ("response_format", ANY_OBJECT)
    field, grammar = asked(response_format={"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": SCHEMA}})
    assert field == "response_format.json_schema.schema"
    assert grammar == "json_schema:" + json.dumps(SCHEMA), "the order of properties is kept"
    for schema in ({}, {"schema": None}):
        assert asked(response_format={"type": "json_schema", "json_schema": {"name": "n", **schema}})[1] == ANY_OBJECT


@pytest.mark.parametrize(
    ("fields", "field", "grammar"),
    [
        ({"regex": "a+"}, "regex", "regex:a+"),
        ({"grammar": 'start: "a"'}, "grammar", 'lark:start: "a"'),
        ({"guided_regex": "a+"}, "guided_regex", "regex:a+"),
        ({"guided_grammar": 'start: "a"'}, "guided_grammar", 'lark:start: "a"'),
        ({"guided_json": SCHEMA}, "guided_json", "json_schema:" + json.dumps(SCHEMA)),
        ({"guided_json": json.dumps(SCHEMA)}, "guided_json", "json_schema:" + json.dumps(SCHEMA)),
        ({"guided_choice": ["a", 'b"é']}, "guided_choice", 'lark:start: "a" | "b\\"é"'),
        ({"structured_outputs": {"regex": "a+"}}, "structured_outputs.regex", "regex:a+"),
        ({"structured_outputs": {"json": SCHEMA}}, "structured_outputs.json", "json_schema:" + json.dumps(SCHEMA)),
        ({"structured_outputs": {"choice": ["a"]}}, "structured_outputs.choice", 'lark:start: "a"'),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, "structured_outputs.grammar", 'lark:start: "a"'),
    ],
)
def test_each_field(fields: dict[str, object], field: str, grammar: str) -> None:
    assert asked(**fields) == (field, grammar)
    compile_grammar(grammar)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {}}, "response_format.type"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": []}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": [1]}}}, "response_format.json_schema.schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"strict": 1}}}, "response_format.json_schema.strict"),
        ({"regex": 1}, "regex"),
        ({"regex": "x" * (MAX_GRAMMAR_BYTES + 1)}, "regex"),
        ({"grammar": ["x"]}, "grammar"),
        ({"guided_json": "not json"}, "guided_json"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": ["a", 1]}, "guided_choice[1]"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs"),
        ({"regex": "a", "grammar": 'start: "a"'}, "grammar"),
        ({"regex": "a", "response_format": {"type": "json_object"}}, "regex"),
    ],
)
def test_refusals(fields: dict[str, object], param: str) -> None:
    with pytest.raises(BadRequest) as error:
        asked(**fields)
    assert error.value.param == param


@pytest.mark.parametrize("options", ['"x-guidance"', '"\\u0078-guidance"'])
def test_a_lark_grammar_sets_no_options_of_the_grammar_library(options: str) -> None:
    lax = f'%json {{{options}: {{"lenient": true}}, "uniqueItems": true, "contains": {{"const": "\\ud800"}}}}'
    for name in ("grammar", "guided_grammar"):
        assert asked(**{name: f"start: a {lax} a {lax}\na: /b/"})[1] == "lark:start: a {0} a {0}\na: /b/".format(
            '%json {"uniqueItems": true, "contains": {"const": "\\ud800"}}'
        )
    nested = f"%lark {{\nstart: {lax.replace('ud800', 'u00e9')}\n}}"
    field, grammar = asked(structured_outputs={"grammar": f"start: {nested}"})
    assert "uniqueItems: these keywords are not supported" in why_not(grammar)
    assert field == "structured_outputs.grammar"
    deep = '%json {"items":' + '{"items":' * 5_000 + "{}" + "}" * 5_001
    with pytest.raises(BadRequest, match="grammar: the schema is nested too deeply"):
        asked(grammar=f"start: {deep}")


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_it_reaches_the_engine_or_is_refused(path: str) -> None:
    async with serve() as node, aiohttp.ClientSession() as session:
        async with session.post(node.url + path, json={**GOOD[path], "regex": "a+"}) as response:
            assert response.status == 200
        assert node.requests.submitted[-1].params.grammar == "regex:a+"
        async with session.post(node.url + path, json={**GOOD[path], "regex": "("}) as response:
            check_error(response.status, await response.text(), "regex")
        assert len(node.requests.submitted) == 1
