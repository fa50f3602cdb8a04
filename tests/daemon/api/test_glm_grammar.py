"""What forced and strict tools let a model write in GLM's dialects, whose strings stand without quotes."""

from __future__ import annotations

import json

import pytest

from daemon.api.bodies.tools import AUTO, NAMED
from daemon.api.generation.call_rules import inexpressible
from daemon.api.generation.tool_grammar import argument_schemas
from daemon.text.tool_parsers import glm
from daemon.text.tool_parsers.registry import GLM45, GLM47
from tests.daemon.api.fakes import entry, serve, text_script
from tests.daemon.api.test_qwen3_coder_grammar import draws_calls, request
from tests.daemon.api.test_tool_grammar import Vocabulary
from tests.daemon.api.test_tools import ask, calls_of, put_together, stream
from tests.daemon.text.test_glm import call

PLAIN = Vocabulary([])
SPECIAL = Vocabulary(["<tool_call>", "</tool_call>", "<think>", "</think>", glm.KEY, glm.END_KEY, glm.VALUE, glm.END_VALUE])
CASES = [(GLM45, PLAIN), (GLM45, SPECIAL), (GLM47, PLAIN), (GLM47, SPECIAL)]


@pytest.mark.parametrize(("dialect", "words"), CASES)
def test_calls_follow_their_schemas(dialect: str, words: Vocabulary) -> None:
    good = call(dialect, "edit", ("path", "a\nb <c>"), ("line", "3"))
    full = call(dialect, "edit", ("path", ""), ("line", "3"), ("kind", 'b</x> "'), ("note", "null"))
    anything, nothing = call(dialect, "any", ("x", "1"), ("y", "\n\n")), call(dialect, "nothing")
    bad = [
        call(dialect, "edit", ("path", "a"), ("line", "100")),
        call(dialect, "edit", ("path", "a")),
        call(dialect, "edit", ("path", "more than twelve"), ("line", "3")),
        call(dialect, "edit", ("path", "a"), ("line", "3"), ("kind", "c")),
        call(dialect, "edit", ("path", "a"), ("line", "3"), ("other", "c")),
        call(dialect, "nothing", ("a", "b")),
        call(GLM47 if dialect == GLM45 else GLM45, "edit", ("path", "a"), ("line", "3")),
    ]
    line = "\n" if dialect == GLM45 else ""
    for tools in (request(), request(AUTO)):
        for text in (good, full, anything, nothing, f"{good}{line}{anything}"):
            assert words.takes(dialect, tools, text), text
        for text in bad:
            assert not words.takes(dialect, tools, text), text
    assert not words.takes(dialect, request(), "Hello")
    assert not words.takes(dialect, request(parallel=False), f"{good}{line}{good}")
    assert words.takes(dialect, request(NAMED), anything)
    assert not words.takes(dialect, request(NAMED), good)
    for text in ("", "Hello < there", f"Hello <b>{good} and {full}.", "<think>hm</think>\n\nYes"):
        assert words.takes(dialect, request(AUTO), text), text
    assert not words.takes(dialect, request(AUTO), f"Hello {bad[0]}")
    assert words.takes(dialect, request(AUTO, strict=False), bad[0])


@pytest.mark.parametrize(("dialect", "words"), CASES)
def test_whatever_a_model_draws_reads_as_calls(dialect: str, words: Vocabulary) -> None:
    draws_calls(dialect, words)


def test_a_value_does_not_spell_the_token_that_ends_it() -> None:
    text = call(GLM47, "any", ("x", "MARK"))
    ids = SPECIAL.tokenizer.encode(text, add_special_tokens=False).ids
    at = ids.index(SPECIAL.tokenizer.token_to_id(glm.VALUE)) + 1
    spelled = [each for char in glm.END_VALUE for each in SPECIAL.tokenizer.encode(char, add_special_tokens=False).ids]
    for mark, is_taken in ((spelled, False), (spelled[:-1], True)):
        matcher = SPECIAL.matcher(GLM47, request())
        written = ids[:at] + mark + ids[at + 4 :]
        assert (matcher.try_consume_tokens(written) == len(written)) == is_taken


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        ({"properties": {"a>": {"type": "string"}}}, None),
        ({"properties": {"a<": {"type": "string"}}}, "properties.a<"),
        ({"properties": {"a": {"type": "string", "pattern": "x"}}}, "properties.a.pattern"),
        ({"properties": {"a": {}}}, "properties.a: a string or something else"),
    ],
)
def test_what_cannot_be_held(schema: dict[str, object], path: str | None) -> None:
    tools = request()
    tools.names, tools.schemas, tools.strict = ["f"], [json.dumps(schema).encode()], [False]
    assert inexpressible(GLM45, argument_schemas(tools)) == (None if path is None else (0, path))


async def test_a_chat() -> None:
    parameters = {"type": "object", "properties": {"path": {"type": "string"}, "line": {"type": "integer"}}}
    tool = {"type": "function", "function": {"name": "edit", "parameters": parameters}}
    calls = [("edit", '{"path": "a", "line": 3}')]
    written = f"\n<think>Hm.</think>\nSo.\n{call(GLM45, 'edit', ('path', 'a'), ('line', '3'))}"
    async with serve(lambda _: text_script(written.encode()), models=[entry(tool_parser=GLM45, reasoning_parser="think")]) as node:
        whole = await ask(node, tools=[tool])
        assert (whole.message.content, calls_of(whole.message), whole.finish_reason) == ("So.", calls, "tool_calls")
        assert put_together(await stream(node, tools=[tool])) == ("So.", "Hm.", calls, "tool_calls")
        day = {"type": "object", "properties": {"day": {"type": "string", "format": "date"}}}
        forced = {"type": "function", "function": {"name": "edit", "parameters": day}}
        await ask(node, tools=[forced], tool_choice="required")
        assert '{\\"name\\":\\"edit\\",' in node.requests.submitted[-1].params.grammar, "it is written in hearthd's own dialect"
