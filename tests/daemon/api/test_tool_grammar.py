"""What forced and strict tools let a model write: the grammars and the parsers of a dialect agree."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer

from daemon.api.bodies.tools import AUTO, NAMED, REQUIRED, ToolRequest
from daemon.api.generation.tool_grammar import argument_schemas, tool_grammar
from daemon.errors import BadRequest
from daemon.text.reply_parser import ReplyParser, parse_whole
from daemon.text.tool_parsers import deepseek, kimi_k2
from daemon.text.tool_parsers.registry import (
    COMMAND,
    DEEPSEEK_V3,
    DEEPSEEK_V31,
    GENERIC,
    GRANITE,
    HERMES,
    KIMI_K2,
    LLAMA3,
    MISTRAL,
    tool_parser,
)
from engine.grammar.compile import compile_grammar
from tests.daemon.text.test_reply_parser import acted, fenced, numbered, separated
from tests.daemon.text.tokenizers_made import byte_level

CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Köln", 'a}</b> "x']}, "days": {"$ref": "#/$defs/days"}},
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"days": {"type": "integer", "minimum": 1, "maximum": 99}},
}
GOOD, BAD = '{"city":"Köln","days":3}', '{"city":"Bonn","days":3}'
DEEPSEEK = [deepseek.OPEN, deepseek.CLOSE, deepseek.BEGIN, deepseek.SEPARATOR, deepseek.END]
KIMI = [kimi_k2.OPEN, kimi_k2.CLOSE, kimi_k2.BEGIN, kimi_k2.ARGUMENTS, kimi_k2.END]
MARKERS = ["<tool_call>", "</tool_call>", "<think>", "</think>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>"]
NEWER = "mistral newer"  # with [ARGS]


def request(choice: str = REQUIRED, parallel: bool = True, strict: bool = False) -> ToolRequest:
    schemas = [json.dumps(CITY).encode(), b'{"type": "object"}']
    return ToolRequest(choice, parallel, ["get_weather", "search"], schemas, [strict, False], "search" if choice == NAMED else "")


def written(dialect: str, *calls: tuple[str, str]) -> str:
    if dialect == GENERIC:
        return "\n".join(f'{{"name":"{name}","arguments":{arguments}}}' for name, arguments in calls)
    if dialect == DEEPSEEK_V3:
        return fenced(*calls)
    if dialect == DEEPSEEK_V31:
        return separated(*calls)
    if dialect == KIMI_K2:
        return numbered(*((f"functions.{name}:{at}", arguments) for at, (name, arguments) in enumerate(calls)))
    objects = [f'{{"name": "{name}", "arguments": {arguments}}}' for name, arguments in calls]
    if dialect == HERMES:
        return "\n".join(f"<tool_call>\n{each}\n</tool_call>" for each in objects)
    if dialect == LLAMA3:
        return "; ".join(each.replace('"arguments"', '"parameters"') for each in objects)
    if dialect == MISTRAL:
        return f"[TOOL_CALLS] [{', '.join(objects)}]"
    if dialect == COMMAND:
        return acted(*calls)
    if dialect == GRANITE:
        return f"<|tool_call|>[{', '.join(objects)}]"
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{arguments}" for name, arguments in calls)


class Vocabulary:
    """A tokenizer with or without the markers as special tokens."""

    def __init__(self, special: list[str]) -> None:
        self.tokenizer: Tokenizer = byte_level()
        self.tokenizer.add_special_tokens(special)
        self.markers = {self.tokenizer.token_to_id(text): text for text in special}
        self.engine = LLTokenizer(self.tokenizer.to_str(), eos_token=self.tokenizer.token_to_id("<|end|>"))
        self.end = self.tokenizer.token_to_id("<|end|>")

    def matcher(self, dialect: str, tools: ToolRequest, answer: str = "") -> LLMatcher:
        known = MISTRAL if dialect == NEWER else dialect
        grammar = tool_grammar(tools, argument_schemas(tools), known, self.markers, answer)
        return LLMatcher(self.engine, compile_grammar(grammar), log_level=0)

    def takes(self, dialect: str, tools: ToolRequest, text: str, answer: str = "") -> bool:
        matcher = self.matcher(dialect, tools, answer)
        ids = self.tokenizer.encode(text, add_special_tokens=False).ids
        assert not matcher.is_error(), matcher.get_error()
        return matcher.try_consume_tokens(ids) == len(ids) and bool(matcher.is_accepting())

    def draw(self, dialect: str, tools: ToolRequest, rng: random.Random, limit: int = 400) -> str | None:
        """A text of random tokens that follows the grammar; None if it did not end."""
        matcher = self.matcher(dialect, tools)
        ids: list[int] = []
        while len(ids) < limit and not matcher.is_stopped():
            mask = matcher.compute_bitmask()
            allowed = [at for at in range(self.tokenizer.get_vocab_size()) if mask[at >> 3] >> (at & 7) & 1]
            assert allowed, matcher.get_error()
            token = self.end if self.end in allowed and rng.random() < 0.3 else rng.choice(allowed)
            if token == self.end:
                break
            matcher.consume_token(token)
            assert not matcher.is_error(), matcher.get_error()
            ids.append(token)
        return self.tokenizer.decode(ids, skip_special_tokens=False) if matcher.is_accepting() else None


PLAIN = Vocabulary([])
SPECIAL = Vocabulary(MARKERS)
OLDER = Vocabulary(["[TOOL_CALLS]"])
SEEK = Vocabulary(["<think>", "</think>", *DEEPSEEK])
COMMANDS = Vocabulary(["<|START_THINKING|>", "<|END_THINKING|>", "<|START_ACTION|>", "<|END_ACTION|>"])
GRANITES = Vocabulary(["<think>", "</think>", "<|tool_call|>"])
KIMIS = Vocabulary(["<think>", "</think>", *KIMI])
CASES: list[tuple[str, Vocabulary]] = [
    (HERMES, PLAIN), (HERMES, SPECIAL), (LLAMA3, PLAIN), (LLAMA3, SPECIAL), (MISTRAL, PLAIN), (MISTRAL, OLDER), (NEWER, SPECIAL),
    (DEEPSEEK_V3, SEEK), (DEEPSEEK_V31, SEEK), (GRANITE, PLAIN), (GRANITE, GRANITES), (COMMAND, PLAIN), (COMMAND, COMMANDS),
    (KIMI_K2, KIMIS), (KIMI_K2, PLAIN),
]  # fmt: skip
FORCED = [*CASES, (GENERIC, PLAIN), (GENERIC, SPECIAL)]  # nobody is free to call in that one
WEATHER, SEARCH = ("get_weather", GOOD), ("search", '{"q":[1,{}]}')


@pytest.mark.parametrize(("dialect", "words"), FORCED)
def test_required_and_named(dialect: str, words: Vocabulary) -> None:
    one, two = written(dialect, WEATHER), written(dialect, WEATHER, SEARCH)
    assert words.takes(dialect, request(), one)
    assert words.takes(dialect, request(), two)
    assert words.takes(dialect, request(parallel=False), one)
    assert not words.takes(dialect, request(parallel=False), two)
    assert not words.takes(dialect, request(), "")
    assert not words.takes(dialect, request(), "Sure. " + one)
    assert not words.takes(dialect, request(), written(dialect, ("get_weather", BAD)))
    assert not words.takes(dialect, request(), written(dialect, ("search", "[1]")))
    assert not words.takes(dialect, request(), written(dialect, ("other", "{}")))
    assert words.takes(dialect, request(NAMED), written(dialect, SEARCH))
    assert not words.takes(dialect, request(NAMED), one)
    assert not words.takes(dialect, request(NAMED), written(dialect, SEARCH, SEARCH))


@pytest.mark.parametrize(("dialect", "words"), CASES)
def test_strict_tools_bind_calls_and_leave_text_alone(dialect: str, words: Vocabulary) -> None:
    tools = request(AUTO, strict=True)
    for text in ("", "Hello < there [x]", written(dialect, WEATHER), written(dialect, WEATHER, SEARCH)):
        assert words.takes(dialect, tools, text), text
    assert not words.takes(dialect, tools, written(dialect, ("get_weather", BAD)))
    if dialect != LLAMA3:
        assert words.takes(dialect, tools, f"Look: {written(dialect, WEATHER)} done")
        assert not words.takes(dialect, tools, f"Look: {written(dialect, ('get_weather', BAD))}")
    elif words is SPECIAL:
        assert words.takes(dialect, tools, f"Look: <|python_tag|>{written(dialect, WEATHER)}")
    if words is not OLDER:
        assert words.takes(dialect, tools, "<think>hm</think>\n\nYes")
        assert words.takes(dialect, tools, "hm</think>\n\nYes"), "the prompt may have opened it"
    if dialect in (HERMES, NEWER):
        assert words.takes(dialect, tools, f"<think>hm</think>\n\n{written(dialect, WEATHER)}")
    assert words.takes(dialect, request(AUTO, parallel=False, strict=True), written(dialect, WEATHER))


@pytest.mark.parametrize(("dialect", "words"), [case for case in CASES if case[0] != LLAMA3])
def test_a_response_format_beside_tools(dialect: str, words: Vocabulary) -> None:
    answer = '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": false}'
    assert words.takes(dialect, request(AUTO), '{"a": 1}', answer)
    assert words.takes(dialect, request(AUTO), written(dialect, SEARCH), answer)
    assert not words.takes(dialect, request(AUTO), '{"a": "1"}', answer)
    assert not words.takes(dialect, request(AUTO), "Hello", answer)


@pytest.mark.parametrize(("dialect", "words"), FORCED)
@pytest.mark.parametrize("choice", [REQUIRED, NAMED])
def test_whatever_a_model_draws_reads_as_calls(dialect: str, words: Vocabulary, choice: str) -> None:
    rng = random.Random(1)
    num_ended = 0
    for _ in range(12):
        tools = request(choice)
        if choice == NAMED:
            tools.name = "get_weather"
        text = words.draw(dialect, tools, rng)
        if text is None:
            continue
        num_ended += 1
        parser = ReplyParser(tool_parser(MISTRAL if dialect == NEWER else dialect, tools.names), None)
        reply = parse_whole(parser, text, cut=False)
        assert reply.calls, text
        assert not reply.content
        for name, arguments in reply.calls:
            value: Any = json.loads(arguments)
            assert isinstance(value, dict)
            if name == "get_weather":
                assert value["city"] in CITY["properties"]["city"]["enum"]  # type: ignore[index]
                assert 1 <= value["days"] <= 99
    assert num_ended >= (12 if choice == NAMED else 2)


@pytest.mark.parametrize(("dialect", "words"), CASES)
def test_forced_and_strict_calls_are_compact(dialect: str, words: Vocabulary) -> None:
    for tools in (request(), request(AUTO, strict=True)):
        for spaced in (GOOD.replace(",", ", "), GOOD.replace(":", ": "), GOOD.replace("{", "{\n"), GOOD.replace("}", " }")):
            assert not words.takes(dialect, tools, written(dialect, ("get_weather", spaced))), spaced
    assert not words.takes(dialect, request(), written(dialect, ("search", '{"q":[1, {}]}')))
    free = request(AUTO, strict=True)
    assert words.takes(dialect, free, written(dialect, ("search", '{ "q": [1, {}] }'))), "that tool is not strict"


@pytest.mark.parametrize(("dialect", "words"), CASES)
@pytest.mark.parametrize("schema", [b"{}", b'{"type": "object", "properties": {}}', b'{"title": "T", "properties": {}}'])
def test_a_tool_without_parameters_gets_none(dialect: str, words: Vocabulary, schema: bytes) -> None:
    for tools in (ToolRequest(REQUIRED, True, ["f"], [schema], [False]), ToolRequest(AUTO, True, ["f"], [schema], [True])):
        assert words.takes(dialect, tools, written(dialect, ("f", "{}")))
        for arguments in ("{ }", '{"a":1}'):
            assert not words.takes(dialect, tools, written(dialect, ("f", arguments)))


@pytest.mark.parametrize(("dialect", "words"), CASES)
def test_properties_that_nobody_declared_are_not_written(dialect: str, words: Vocabulary) -> None:
    schema = {"type": "object", "properties": {"a": {"properties": {"b": {}}}, "c": {"type": "object"}}}
    for tools in (
        ToolRequest(REQUIRED, True, ["f"], [json.dumps(schema).encode()], [False]),
        ToolRequest(AUTO, True, ["f"], [json.dumps(schema).encode()], [True]),
    ):
        assert words.takes(dialect, tools, written(dialect, ("f", '{"a":{"b":1},"c":{"d":1}}')))
        for arguments in ('{"x":1}', '{"a":{"x":1}}'):
            assert not words.takes(dialect, tools, written(dialect, ("f", arguments)))


def test_options_of_the_grammar_library_are_not_a_clients_to_set() -> None:
    schema = b'{"x-guidance": {"whitespace_flexible": true}, "properties": {"a": {"type": "integer"}}}'
    tools = ToolRequest(REQUIRED, True, ["f"], [schema], [False])
    assert not PLAIN.takes(HERMES, tools, written(HERMES, ("f", '{ "a":1}')))


def test_notes_are_left_out_of_the_grammar_and_nothing_else() -> None:
    schema = {
        "title": "T",
        "description": "D",
        "type": "object",
        "properties": {
            "title": {"type": "string", "description": "d"},
            "enum": {"enum": [{"title": "kept"}, "description"]},
            "list": {"anyOf": [{"type": "array", "items": {"title": "x", "const": {"title": "kept"}}}]},
        },
        "required": ["title", "description"],
        "additionalProperties": False,
    }
    (bare,) = argument_schemas(ToolRequest(REQUIRED, True, ["f"], [json.dumps(schema).encode()], [False]))
    told = json.loads(bare)
    del told["x-guidance"]
    assert told == {
        "type": "object",
        "properties": {
            "title": {"type": "string"},
            "enum": {"enum": [{"title": "kept"}, "description"]},
            "list": {"anyOf": [{"type": "array", "items": {"const": {"title": "kept"}}}]},
        },
        "required": ["title", "description"],
        "additionalProperties": False,
    }


def test_a_schema_must_be_of_an_object() -> None:
    tools = ToolRequest(REQUIRED, True, ["f", "g"], [b"{}", b'{"type": "array"}'], [False, False])
    with pytest.raises(BadRequest) as error:
        argument_schemas(tools)
    assert error.value.param == "tools[1].function.parameters.type"
    tools.choice = AUTO
    assert [json.loads(schema)["type"] for schema in argument_schemas(tools)] == ["object", "object"]
