"""What a grammar lets a model write in Harmony: its headers, free analysis, and calls and answers that follow their schemas."""

from __future__ import annotations

import json
import random

import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer

from daemon.api.bodies.tools import AUTO, NAMED, REQUIRED
from daemon.api.generation.harmony_grammar import HarmonyGrammar
from daemon.api.generation.tool_grammar import argument_schemas
from daemon.text.detokenizer import decode
from daemon.text.grammar_check import why_not
from daemon.text.reply_parser import ReplyParser, parse_whole
from daemon.text.table_builder import build_table, read_tokenizer_file
from daemon.text.token_table import MarkedTable, TokenTable
from daemon.text.tool_parsers.harmony import MARKS, HarmonyParser, marks_of
from engine.grammar.compile import compile_grammar
from tests.daemon.api.test_tool_grammar import BAD, GOOD, request
from tests.daemon.text.tokenizers_made import byte_level

TOKENIZER: Tokenizer = byte_level()
TOKENIZER.add_special_tokens(list(MARKS))
FIRST_MARKS = marks_of({token_id: token.content for token_id, token in TOKENIZER.get_added_tokens_decoder().items()})
ENDS = [TOKENIZER.token_to_id(name) for name in ("<|return|>", "<|call|>")]
ENGINE = LLTokenizer(TOKENIZER.to_str(), eos_token=ENDS)
TABLE = TokenTable(
    build_table(read_tokenizer_file(TOKENIZER.to_str().encode(), "made"), "made", TOKENIZER.decode), TOKENIZER.get_vocab_size()
)
THINKS, AGAIN = "<|channel|>analysis<|message|>They <ask>.\n<|end|>", "<|start|>assistant"
FINAL = "<|channel|>final<|message|>"
SCHEMA = '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": false}'


def called(name: str, arguments: str) -> str:
    return f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{arguments}"


def takes(grammar: str, text: str) -> bool:
    matcher = LLMatcher(ENGINE, compile_grammar(grammar), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    ids = TOKENIZER.encode(text, add_special_tokens=False).ids
    return matcher.try_consume_tokens(ids) == len(ids) and bool(matcher.is_accepting())


def grammars(begun: bool = True, in_answer: bool = False) -> HarmonyGrammar:
    assert begun or not in_answer
    return HarmonyGrammar(FIRST_MARKS, begun, in_answer)


def for_tools(choice: str, strict: bool = False, answer: str = "", **options: bool) -> str:
    tools = request(choice, strict=strict)
    grammar = grammars(**options).tools(tools, argument_schemas(tools), answer)
    assert not why_not(HarmonyGrammar({}, True, False).tools(tools, argument_schemas(tools), answer))
    return grammar


def test_forced_calls() -> None:
    grammar, named = for_tools(REQUIRED), for_tools(NAMED)
    good, search = called("get_weather", GOOD), called("search", '{"q":[1]}')
    for begin in ("", THINKS + AGAIN, (THINKS + AGAIN) * 2):
        assert takes(grammar, begin + good)
        assert takes(named, begin + search)
        for text in (called("get_weather", BAD), called("other", "{}"), f"{FINAL}No.", "No.", ""):
            assert not takes(grammar, begin + text)
        assert not takes(named, begin + good)
    assert not takes(grammar, f"{good}<|end|>{AGAIN}{search}"), "one call ends the reply"
    assert takes(for_tools(REQUIRED, begun=False), f"{AGAIN}{THINKS}{AGAIN}{good}")
    assert takes(for_tools(REQUIRED, in_answer=True), f"<|end|>{AGAIN}{good}")


def test_strict_tools_bind_calls_and_leave_text_alone() -> None:
    grammar = for_tools(AUTO, strict=True)
    say = f"<|channel|>commentary<|message|>I look.<|end|>{AGAIN}"
    for begin in ("", THINKS + AGAIN, THINKS + AGAIN + say):
        for text in (f"{FINAL}Hello < there", FINAL, called("get_weather", GOOD), called("search", '{"q": 1}')):
            assert takes(grammar, begin + text), begin + text
        assert not takes(grammar, begin + called("get_weather", BAD))
    continued = for_tools(AUTO, strict=True, in_answer=True)
    for text in ("", " and on", f" and on<|end|>{AGAIN}{called('get_weather', GOOD)}"):
        assert takes(continued, text)


def test_a_response_format_beside_tools() -> None:
    grammar = for_tools(AUTO, answer=SCHEMA)
    assert takes(grammar, f'{THINKS}{AGAIN}{FINAL}{{"a": 1}}')
    assert takes(grammar, called("search", "{}"))
    assert not takes(grammar, f"{FINAL}Hello")


@pytest.mark.parametrize(
    ("asked", "good", "bad"),
    [
        (f"json_schema:{SCHEMA}", '{"a": 1}', '{"a": "1"}'),
        (f"compact_json:{SCHEMA}", '{"a":1}', '{"a": 1}'),
        ("regex:a/b\\/c|\n+\\d{2}", "a/b/c", "a"),
        ("regex:a/b\\/c|\n+\\d{2}", "\n\n12", "12"),
        ('lark:start: "yes" | "n}o"', "n}o", "maybe"),
        ("lark:%llguidance {}\nstart: answer+ TEXT\nanswer: /[0-9]/\nTEXT: /x+/", "12xx", "xx"),
        (f"lark:start: %json {SCHEMA}", '{"a":1}', "1"),
    ],
)
def test_an_answer_that_follows_a_grammar(asked: str, good: str, bad: str) -> None:
    assert not why_not(HarmonyGrammar({}, True, False).answer(asked))
    grammar = grammars().answer(asked)
    for begin in ("", THINKS + AGAIN):
        assert takes(grammar, begin + FINAL + good)
        assert not takes(grammar, begin + FINAL + bad)
    assert not takes(grammar, good)
    assert takes(grammars(begun=False).answer(asked), f"{AGAIN}{THINKS}{AGAIN}{FINAL}{good}")
    assert grammars(in_answer=True).answer(asked) == asked


def test_whatever_a_model_draws_reads_as_a_call_or_an_answer() -> None:
    rng = random.Random(1)
    tools = request()
    schemas = argument_schemas(tools)
    table = MarkedTable(TABLE, FIRST_MARKS)
    num_ended = 0
    for at in range(24):
        grammar = grammars().answer(f"json_schema:{SCHEMA}") if at % 2 else grammars().tools(tools, schemas, "")
        matcher = LLMatcher(ENGINE, compile_grammar(grammar), log_level=0)
        ids: list[int] = []
        while len(ids) < 300 and not matcher.is_stopped():
            mask = matcher.compute_bitmask()
            allowed = [each for each in range(TOKENIZER.get_vocab_size()) if mask[each >> 3] >> (each & 7) & 1]
            marks = [each for each in allowed if each in FIRST_MARKS]  # else the analysis would not end
            token = rng.choice(marks if marks and rng.random() < 0.5 else allowed)
            if token in ENDS:
                break
            matcher.consume_token(token)
            ids.append(token)
        if not matcher.is_accepting():
            continue
        num_ended += 1
        reply = parse_whole(ReplyParser(HarmonyParser(tools.names), None), decode(table, ids), cut=False)
        if at % 2:
            assert not reply.calls
            assert list(json.loads(reply.content)) == ["a"]
        else:
            assert not reply.content
            assert len(reply.calls) == 1
            assert isinstance(json.loads(reply.calls[0][1]), dict)
    assert num_ended > 6
