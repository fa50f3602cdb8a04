"""Replies of each dialect, whole and in every cut: the same calls, content and reasoning."""

from __future__ import annotations

import itertools
import json
import os
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daemon.text.reasoning import MARKERS, THINK, ReasoningSplitter, detect_reasoning, reasoning_end
from daemon.text.reply_parser import Reply, ReplyParser, parse_whole
from daemon.text.tool_parsers.call_numbers import CallNumbers
from daemon.text.tool_parsers.json_value import JsonValue
from daemon.text.tool_parsers.pieces import ARGUMENTS, BROKEN, CALL, CALL_END, CONTENT, REASONING, Piece
from daemon.text.tool_parsers.registry import (
    COMMAND,
    DEEPSEEK_V3,
    DEEPSEEK_V31,
    GEMMA4,
    GENERIC,
    GLM45,
    GLM47,
    GRANITE,
    HERMES,
    KIMI_K2,
    LLAMA3,
    MISTRAL,
    NONE,
    QWEN3_CODER,
    SEED_OSS,
    detect_tools,
    id_of_call,
    tool_parser,
)

NAMES = ["get_weather", "search"]
WEATHER = '{"city": "Köln \\"am\\" Rhein</tool_call>", "days": [1, 2.5e3, -0, null, true], "u": "\\u00e9"}'
SEARCH = '{ "q" : "a } ] , b",\n "n":{}, "l": [[],{}] }'


DS_BEGIN = "<｜tool▁call▁begin｜>"


def call(name: str, arguments: str, key: str = "arguments") -> str:
    return json.dumps({"name": name})[:-1] + f', "{key}": {arguments}}}'


def compact(name: str, arguments: str) -> str:
    return f'{{"name":"{name}","arguments":{arguments}}}'


def reversed_call(name: str, arguments: str) -> str:
    return f'{{"arguments": {arguments}, "name": "{name}"}}'


def fenced(*calls: tuple[str, str]) -> str:
    """Returns the calls as DeepSeek-V3 writes them."""
    written = (f"{DS_BEGIN}function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```<｜tool▁call▁end｜>" for name, arguments in calls)
    return "<｜tool▁calls▁begin｜>" + "\n".join(written) + "<｜tool▁calls▁end｜>"


def separated(*calls: tuple[str, str]) -> str:
    """Returns the calls as DeepSeek-V3.1 writes them."""
    written = (f"{DS_BEGIN}{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>" for name, arguments in calls)
    return "<｜tool▁calls▁begin｜>" + "".join(written) + "<｜tool▁calls▁end｜>"


def numbered(*calls: tuple[str, str]) -> str:
    """Returns calls as Kimi K2 writes them. A call: its id, and its arguments."""
    written = (f"<|tool_call_begin|>{each}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>" for each, arguments in calls)
    return "<|tool_calls_section_begin|>" + "".join(written) + "<|tool_calls_section_end|>"


def acted(*calls: tuple[str, str]) -> str:
    """Returns calls as Cohere's Command models write them."""
    written = (f'{{"tool_call_id": "{at}", "tool_name": "{name}", "parameters": {each}}}' for at, (name, each) in enumerate(calls))
    return "<|START_ACTION|>[\n    " + ",\n    ".join(written) + "\n]<|END_ACTION|>"


ONE, TWO = [("get_weather", WEATHER)], [("get_weather", WEATHER), ("search", SEARCH)]
# dialect, text, the reply
REPLIES = {
    "hermes": (HERMES, f"<tool_call>\n{call(*ONE[0])}\n</tool_call>", Reply(calls=ONE)),
    "hermes text before": (HERMES, f"Let me look.\n\n<tool_call>{call(*ONE[0])}</tool_call>", Reply("Let me look.", calls=ONE)),
    "hermes two": (
        HERMES,
        f"<tool_call>\n{call(*TWO[0])}\n</tool_call>\n<tool_call>\n{call(*TWO[1])}\n</tool_call>\n",
        Reply(calls=TWO),
    ),
    "hermes text between and behind": (
        HERMES,
        f"a <tool_call>{call(*TWO[0])}</tool_call> b <tool_call>{call(*TWO[1])}</tool_call> c",
        Reply("a b c", calls=TWO),
    ),
    "hermes arguments first": (HERMES, f"<tool_call>{reversed_call(*ONE[0])}</tool_call>", Reply(calls=ONE)),
    "hermes no closing marker": (HERMES, f"<tool_call>{call(*TWO[0])}\n<tool_call>{call(*TWO[1])}", Reply(calls=TWO)),
    "hermes no arguments": (HERMES, '<tool_call>{"name": "search"}</tool_call>', Reply(calls=[("search", "{}")])),
    "hermes null arguments": (HERMES, f"<tool_call>{call('search', 'null')}</tool_call>", Reply(calls=[("search", "{}")])),
    "hermes arguments as a string": (
        HERMES,
        f"<tool_call>{call('search', json.dumps(SEARCH))}</tool_call>",
        Reply(calls=[("search", SEARCH)]),
    ),
    "hermes unknown tool": (HERMES, f"<tool_call>{call('other.tool-1', '{}')}</tool_call>", Reply(calls=[("other.tool-1", "{}")])),
    "hermes plain": (HERMES, "  a < b <tool> c </tool_call> <tool_cal", Reply("  a < b <tool> c </tool_call> <tool_cal")),
    "hermes blank": (HERMES, " \n ", Reply(" \n ")),
    "hermes no json": (HERMES, "x <tool_call>search(1)</tool_call> y", Reply("x <tool_call>search(1)</tool_call> y")),
    "hermes no name": (HERMES, '<tool_call>{"arguments": {"a": 1}}</tool_call>', None),
    "hermes name no string": (HERMES, '<tool_call>{"name": 1, "arguments": {}}</tool_call>', None),
    "hermes name empty": (HERMES, '<tool_call>{"name": "", "arguments": {}}</tool_call>', None),
    "hermes two names": (HERMES, '<tool_call>{"name": "a", "name": "b"}</tool_call>', None),
    "hermes half a surrogate": (HERMES, '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>', None),
    "hermes arguments no object": (HERMES, '<tool_call>{"name": "a", "arguments": [1]}</tool_call>', None),
    "hermes broken arguments": (HERMES, '<tool_call>{"name": "a", "arguments": {"x": 01}}</tool_call> y', None),
    "hermes python arguments": (HERMES, "<tool_call>{\"name\": \"a\", \"arguments\": {'x': 1}}</tool_call>", None),
    "hermes brace missing": (HERMES, '<tool_call>{"name": "a", "arguments": {"x": 1}</tool_call>', None),
    "hermes unfinished": (HERMES, '<tool_call>{"name": "a", "arguments": {"x": "1', None),
    "hermes bad then good": (
        HERMES,
        f"<tool_call>{{nope}}</tool_call><tool_call>{call(*ONE[0])}</tool_call>",
        Reply("<tool_call>{nope}</tool_call>", calls=ONE),
    ),
    "llama3": (LLAMA3, call(*ONE[0], key="parameters"), Reply(calls=ONE)),
    "llama3 typed": (LLAMA3, '\n{"type": "function", "name": "search", "parameters": {}}', Reply(calls=[("search", "{}")])),
    "llama3 tag": (LLAMA3, f"<|python_tag|>{call(*ONE[0], key='parameters')}", Reply(calls=ONE)),
    "llama3 text and tag": (LLAMA3, f"I look. <|python_tag|>{call(*ONE[0])}", Reply("I look.", calls=ONE)),
    "llama3 two": (LLAMA3, f"{call(*TWO[0], key='parameters')}; {call(*TWO[1])}", Reply(calls=TWO)),
    "llama3 two lines": (LLAMA3, f"<|python_tag|>{call(*TWO[0])}\n{call(*TWO[1])}\n", Reply(calls=TWO)),
    "llama3 two tags": (LLAMA3, f"<|python_tag|>{call(*TWO[0])}<|python_tag|>{call(*TWO[1])}", Reply(calls=TWO)),
    "llama3 code": (LLAMA3, '<|python_tag|>search.call(q="a")', Reply('<|python_tag|>search.call(q="a")')),
    "llama3 answers in json": (LLAMA3, '{"temperature": 3, "name": "search"}', Reply('{"temperature": 3, "name": "search"}')),
    "llama3 somebody's name": (LLAMA3, '{"name": "Bob", "parameters": {}}', Reply('{"name": "Bob", "parameters": {}}')),
    "llama3 json later": (LLAMA3, f"Use {call('search', '{}')}", Reply(f"Use {call('search', '{}')}")),
    "llama3 text behind": (LLAMA3, f"{call(*ONE[0])}; so", Reply("; so", calls=ONE)),
    "command": (COMMAND, acted(*ONE), Reply(calls=ONE)),
    "command two and text": (COMMAND, f"Hm. {acted(*TWO)} Done", Reply("Hm. Done", calls=TWO)),
    "command unclosed": (COMMAND, acted(*TWO).removesuffix("<|END_ACTION|>"), Reply(calls=TWO)),
    "command another key": (COMMAND, f"<|START_ACTION|>[{call(*ONE[0])}]<|END_ACTION|>", None),
    "granite": (GRANITE, f"<|tool_call|>[{call(*ONE[0])}]", Reply(calls=ONE)),
    "granite two": (GRANITE, f"<|tool_call|> [{call(*TWO[0])}, {call(*TWO[1])}]", Reply(calls=TWO)),
    "granite text": (GRANITE, f"Right. <|tool_call|>[{call(*ONE[0])}] Done", Reply("Right. Done", calls=ONE)),
    "granite object": (GRANITE, f"<|tool_call|>{call(*ONE[0])}", Reply(calls=ONE)),
    "granite unclosed": (GRANITE, f"<|tool_call|>[{call(*ONE[0])}", Reply(calls=ONE)),
    "granite a name": (GRANITE, "<|tool_call|>search{}", None),
    "granite no json": (GRANITE, "<|tool_call|>[search]", None),
    "mistral": (MISTRAL, f"[TOOL_CALLS] [{call(*ONE[0])}]", Reply(calls=ONE)),
    "mistral two": (MISTRAL, f"[TOOL_CALLS][{call(*TWO[0])}, {call(*TWO[1])[:-1]}, \"id\": \"abcdefghi\"}}]", Reply(calls=TWO)),
    "mistral text": (MISTRAL, f"Right. [TOOL_CALLS] [{call(*ONE[0])}] Done", Reply("Right. Done", calls=ONE)),
    "mistral unclosed": (MISTRAL, f"[TOOL_CALLS] [{call(*ONE[0])}", Reply(calls=ONE)),
    "mistral object": (MISTRAL, f"[TOOL_CALLS] {call(*ONE[0])}", Reply(calls=ONE)),
    "mistral named": (MISTRAL, f"[TOOL_CALLS]get_weather[ARGS]{WEATHER}", Reply(calls=ONE)),
    "mistral named two": (
        MISTRAL,
        f"Hm.[TOOL_CALLS]get_weather[ARGS]{WEATHER}[TOOL_CALLS]search[ARGS]{SEARCH}",
        Reply("Hm.", calls=TWO),
    ),
    "mistral named with id": (MISTRAL, f"[TOOL_CALLS]search[CALL_ID]a1b2c3d4e[ARGS] {SEARCH}", Reply(calls=TWO[1:])),
    "mistral named without mark": (MISTRAL, f"[TOOL_CALLS]search{SEARCH}", Reply(calls=TWO[1:])),
    "mistral no call": (MISTRAL, "[TOOL_CALLS]well, no [TOOL", Reply("[TOOL_CALLS]well, no [TOOL")),
    "mistral no name": (MISTRAL, "[TOOL_CALLS][ARGS]{}", Reply("[TOOL_CALLS][ARGS]{}")),
    "mistral ids only": (MISTRAL, "[TOOL_CALLS]a[CALL_ID]b{}", Reply("[TOOL_CALLS]a[CALL_ID]b{}")),
    "mistral empty list": (MISTRAL, "[TOOL_CALLS] []", Reply("[TOOL_CALLS] []")),
    "mistral marker only": (MISTRAL, "[TOOL_CALLS] ", Reply("[TOOL_CALLS] ")),
    "mistral broken second": (
        MISTRAL,
        f"[TOOL_CALLS] [{call(*ONE[0])}, {{'name'}}]",
        Reply(", {'name'}]", calls=ONE),
    ),
    "deepseek v3": (DEEPSEEK_V3, f"Hm.{fenced(*ONE)}", Reply("Hm.", calls=ONE)),
    "deepseek v3 two": (DEEPSEEK_V3, fenced(*TWO), Reply(calls=TWO)),
    "deepseek v3.1": (DEEPSEEK_V31, f"Hm.\n{separated(*TWO)} so", Reply("Hm. so", calls=TWO)),
    "deepseek no fence": (DEEPSEEK_V3, fenced(*ONE).replace("```json", "").replace("```", ""), Reply(calls=ONE)),
    "deepseek no ends": (DEEPSEEK_V31, separated(*TWO).replace("<｜tool▁call▁end｜>", "")[:-18], Reply(calls=TWO)),
    "deepseek no call": (DEEPSEEK_V31, "<｜tool▁calls▁begin｜>well <｜tool▁call", Reply("<｜tool▁calls▁begin｜>well <｜tool▁call")),
    "deepseek no name": (DEEPSEEK_V3, fenced(("", "{}")), None),
    "deepseek bad name": (DEEPSEEK_V31, separated(("a b", "{}")), None),
    "deepseek other kind": (DEEPSEEK_V3, fenced(*ONE).replace("function", "code"), None),
    "deepseek other fence": (DEEPSEEK_V3, fenced(*ONE).replace("```json", "```js"), None),
    "deepseek broken": (DEEPSEEK_V31, separated(("a", '{"x": 01}')), None),
    "deepseek unfinished": (DEEPSEEK_V31, separated(*ONE)[:60], None),
    "kimi": (KIMI_K2, f"Hm. {numbered(('functions.get_weather:0', WEATHER))} so", Reply("Hm. so", calls=ONE)),
    "kimi two": (KIMI_K2, numbered(("functions.get_weather:3", WEATHER), ("functions.search:4", SEARCH)), Reply(calls=TWO)),
    "kimi spaced": (
        KIMI_K2,
        numbered((" functions.get_weather:0\n", f"\n{WEATHER}\n"), (" search:1 ", SEARCH)).replace("<|tool_call_", " <|tool_call_"),
        Reply(calls=TWO),
    ),
    "kimi no number": (KIMI_K2, numbered(("functions.get_weather", WEATHER)), Reply(calls=ONE)),
    "kimi no ends": (
        KIMI_K2,
        numbered(("functions.get_weather:0", WEATHER), ("functions.search:1", SEARCH)).replace("<|tool_call_end|>", "")[:-26],
        Reply(calls=TWO),
    ),
    "kimi two sections": (
        KIMI_K2,
        f"a{numbered(('functions.get_weather:0', WEATHER))}\nb\n{numbered(('functions.search:1', SEARCH))}",
        Reply("a\nb", calls=TWO),
    ),
    "kimi no call": (KIMI_K2, f"{numbered()[:28]}well <|tool_calls", Reply(f"{numbered()[:28]}well <|tool_calls")),
    "kimi a number alone": (KIMI_K2, numbered(("3", "{}")), None),
    "kimi no name": (KIMI_K2, numbered(("functions.:0", "{}")), None),
    "kimi bad number": (KIMI_K2, numbered(("functions.a:b", "{}")), None),
    "kimi no object": (KIMI_K2, numbered(("functions.a:0", "[1]")), None),
    "kimi broken": (KIMI_K2, numbered(("functions.a:0", '{"x": 01}')), None),
    "kimi unfinished": (KIMI_K2, numbered(("functions.a:0", '{"x": "1"}'))[:80], None),
    "generic": (GENERIC, compact(*ONE[0]), Reply(calls=ONE)),
    "generic two": (GENERIC, f"{compact(*TWO[0])}\n{compact(*TWO[1])}", Reply(calls=TWO)),
    "generic blanks": (GENERIC, f"\n {call(*TWO[0])} \n\n{call(*TWO[1])}\n", Reply(calls=TWO)),
    "generic empty": (GENERIC, "", Reply("")),
    "generic blank": (GENERIC, " \n", Reply(" \n")),
    "generic text": (GENERIC, f"So: {compact(*ONE[0])}", Reply(f"So: {compact(*ONE[0])}")),
    "generic text behind": (GENERIC, f"{compact(*ONE[0])}\nso {compact(*ONE[0])}", Reply(f"\nso {compact(*ONE[0])}", calls=ONE)),
    "generic somebody's name": (GENERIC, '{"name":"Bob","arguments":{}}', Reply('{"name":"Bob","arguments":{}}')),
    "generic other keys": (GENERIC, '{"name":"search","a":{}}', None),
    "generic unfinished": (GENERIC, '{"name":"search","arguments":{"x":"1', None),
}  # fmt: skip


def parser(dialect: str = NONE, reasoning: bool | None = None, one_call: bool = False) -> ReplyParser:
    """reasoning: None: no splitter, else whether the prompt opened it."""
    return ReplyParser(
        None if dialect == NONE else tool_parser(dialect, NAMES),
        None if reasoning is None else ReasoningSplitter(reasoning),
        one_call,
    )


def in_pieces(parser: ReplyParser, parts: list[str], cut: bool = False) -> list[Piece]:
    """Neighbours of a kind joined."""
    joined: list[Piece] = []
    for piece in [*(piece for part in parts for piece in parser.add(part)), *parser.end(cut)]:
        if joined and piece.kind in (CONTENT, REASONING, ARGUMENTS) and joined[-1][::2] == piece[::2]:
            joined[-1] = piece._replace(text=joined[-1].text + piece.text)
        else:
            joined.append(piece)
    return joined


def split(text: str, points: list[int]) -> list[str]:
    cuts = [0, *sorted(points), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(cuts)]


@pytest.mark.parametrize("name", REPLIES)
def test_a_whole_reply(name):
    dialect, text, reply = REPLIES[name]
    assert parse_whole(parser(dialect), text, cut=False) == (reply or Reply(text))


@pytest.mark.parametrize("name", REPLIES)
def test_every_cut_in_two_and_one_character_at_a_time_give_the_same(name):
    dialect, text, _ = REPLIES[name]
    whole = in_pieces(parser(dialect), [text])
    assert in_pieces(parser(dialect), list(text)) == whole
    for at in range(len(text)):
        assert in_pieces(parser(dialect), [text[:at], text[at:]]) == whole


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(sorted(REPLIES)), st.booleans(), st.booleans(), st.data())
def test_any_cuts_give_the_same(name, reasoning, cut, data):
    dialect, text, _ = REPLIES[name]
    if reasoning:
        text = "<think>\nWhat < does </thi it\n\n want? </think>\n\n" + text
    points = data.draw(st.lists(st.integers(0, len(text)), max_size=12))
    splitter = False if reasoning else None
    assert in_pieces(parser(dialect, splitter), split(text, points), cut) == in_pieces(parser(dialect, splitter), [text], cut)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from([COMMAND, DEEPSEEK_V3, DEEPSEEK_V31, GRANITE, HERMES, KIMI_K2, LLAMA3, MISTRAL, GENERIC]), st.data())
def test_damaged_text_gives_the_same_in_any_cuts_and_loses_nothing(dialect, data):
    _, text, _ = REPLIES[data.draw(st.sampled_from([name for name in sorted(REPLIES) if REPLIES[name][0] == dialect]))]
    at, end = sorted((data.draw(st.integers(0, len(text))), data.draw(st.integers(0, len(text)))))
    text = text[:at] + data.draw(st.sampled_from(["", "<", "[", "{", "}", '"', "\\", "x", ",", "é\n"])) + text[end:]
    points = data.draw(st.lists(st.integers(0, len(text)), max_size=8))
    assert in_pieces(parser(dialect), split(text, points)) == in_pieces(parser(dialect), [text])
    reply = parse_whole(parser(dialect), text, cut=False)
    if not reply.calls:
        assert reply.content == text
    for name, arguments in reply.calls:
        assert name
        assert isinstance(json.loads(arguments), dict)


@pytest.mark.parametrize("name", ["hermes text before", "generic"])
def test_what_streams_first_is_the_name_and_what_follows_is_as_generated(name):
    dialect, text, _ = REPLIES[name]
    reading = parser(dialect)
    kinds, arguments = [], []
    for char in text:
        for piece in reading.add(char):
            kinds.append(piece.kind)
            if piece.kind == ARGUMENTS:
                assert len(piece.text) == 1
                arguments.append(piece.text)
    assert "".join(arguments) == WEATHER
    assert kinds == [CONTENT] * kinds.count(CONTENT) + [CALL] + [ARGUMENTS] * len(WEATHER) + [CALL_END]


def test_a_call_that_turns_out_broken_is_withdrawn_with_its_text():
    text = 'x <tool_call>{"name": "a", "arguments": {"x": 01}}</tool_call> y'
    pieces = in_pieces(parser(HERMES), list(text))
    assert pieces == [
        Piece(CONTENT, "x"),
        Piece(CALL, "a"),
        Piece(ARGUMENTS, '{"x": 01'),
        Piece(BROKEN, ' <tool_call>{"name": "a", "arguments": {"x": 01'),
        Piece(CONTENT, "}}</tool_call> y"),
    ]


@pytest.mark.parametrize(
    ("dialect", "text"),
    [
        (HERMES, '<tool_call>{"name": "search", "arguments": {"q": "x'),
        (LLAMA3, '{"name": "search", "parameters": {"q": "x'),
        (MISTRAL, '[TOOL_CALLS] [{"name": "search", "arguments": {"q": "x'),
        (MISTRAL, '[TOOL_CALLS]search[ARGS]{"q": "x'),
        (GENERIC, '{"name":"search","arguments":{"q": "x'),
        (DEEPSEEK_V31, '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>search<｜tool▁sep｜>{"q": "x'),
        (KIMI_K2, numbered(("functions.search:0", '{"q": "x'))[:-43]),
    ],
)
def test_a_call_cut_off_by_max_tokens_stays_a_call(dialect, text):
    assert parse_whole(parser(dialect), text, cut=True) == Reply(calls=[("search", '{"q": "x')])
    assert parse_whole(parser(dialect), text, cut=False) == Reply(text)


def test_one_call_only():
    dialect, text, _ = REPLIES["hermes two"]
    reading = parser(dialect, one_call=True)
    assert parse_whole(reading, text, cut=False) == Reply(calls=ONE)
    assert reading.num_calls == 1


@pytest.mark.parametrize(
    ("opened", "text", "reasoning", "content"),
    [
        (False, "<think>\nso\n\nit is\n</think>\n\nYes.", "so\n\nit is", "Yes."),
        (False, "\n <think>a</think>b", "a", "b"),
        (False, "<think>never closed </thin", "never closed </thin", ""),
        (False, "<think>\n\n</think>\n\nYes", "", "Yes"),
        (False, "Yes <think>no</think>", "", "Yes <think>no</think>"),
        (False, "<thin", "", "<thin"),
        (False, " <thinner", "", " <thinner"),
        (False, " \n", "", " \n"),
        (True, "\nso</think>\n\n\nYes </think>", "so", "Yes </think>"),
        (True, "so <think> it is \n", "so <think> it is", ""),
        (True, "  indented\n</think>  code", "  indented", "  code"),
    ],
)
def test_reasoning_is_split_off(opened, text, reasoning, content):
    for parts in ([text], list(text), *([text[:at], text[at:]] for at in range(len(text)))):
        reading = parser(reasoning=opened)
        pieces = in_pieces(reading, parts)
        assert "".join(piece.text for piece in pieces if piece.kind == REASONING) == reasoning
        assert "".join(piece.text for piece in pieces if piece.kind == CONTENT) == content


@pytest.mark.parametrize("thought", ["", "<|START_THINKING|>hm <|START_TEXT|><|END_THINKING|>"])
def test_the_texts_around_an_answer_do_not_show(thought):
    for begin, end in (("<|START_RESPONSE|>", "<|END_RESPONSE|>"), ("<|START_TEXT|>", "<|END_TEXT|>")):
        for answer in (f"{begin}Yes < |<|START{end}", f"{begin}Yes < |<|START"):
            text = thought + answer
            for parts in ([text], list(text), *([text[:at], text[at:]] for at in range(len(text)))):
                reading = ReplyParser(tool_parser(COMMAND, NAMES), ReasoningSplitter(False, MARKERS["command"]))
                pieces = in_pieces(reading, parts)
                assert "".join(piece.text for piece in pieces if piece.kind == CONTENT) == "Yes < |<|START"
                assert [piece.text for piece in pieces if piece.kind == REASONING] == (["hm <|START_TEXT|>"] if thought else [])


def test_a_call_named_while_reasoning_is_none():
    text = f"<think>I could <tool_call>{call(*ONE[0])}</tool_call></think>{REPLIES['hermes'][1]}"
    reply = parse_whole(parser(HERMES, False), text, cut=False)
    assert reply.calls == ONE
    assert reply.reasoning.startswith("I could <tool_call>")


@pytest.mark.parametrize(
    ("opened", "text", "reasoning", "content"),
    [
        (True, f"so\n{numbered(('functions.search:0', '{}'))}", "so", ""),
        (False, f"<think>so {numbered(('functions.search:0', '{}'))} Yes", "so", " Yes"),
        (True, f"so</think>Hm {numbered(('functions.search:0', '{}'))}", "so", "Hm"),
    ],
)
def test_a_section_of_calls_ends_the_reasoning(opened, text, reasoning, content):
    """Kimi K2 Thinking leaves </think> out before its calls at times."""
    marker = "<|tool_calls_section_begin|>"
    for parts in ([text], list(text), *([text[:at], text[at:]] for at in range(len(text)))):
        reading = ReplyParser(tool_parser(KIMI_K2, NAMES), ReasoningSplitter(opened, MARKERS[THINK], marker))
        pieces = in_pieces(reading, parts)
        assert [piece.text for piece in pieces if piece.kind == REASONING] == [reasoning]
        assert "".join(piece.text for piece in pieces if piece.kind == CONTENT) == content
        assert [piece.text for piece in pieces if piece.kind == CALL] == ["search"]
    assert text[: reasoning_end(text, MARKERS[THINK].close, marker)].endswith("so")


def values() -> st.SearchStrategy[object]:
    scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
    return st.recursive(scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4))


def read(text: str, rng: random.Random) -> tuple[bool, int]:
    """(whether it is a whole value, how much of it was read), in random cuts."""
    value, at = JsonValue(), 0
    while at < len(text) and not (value.done or value.bad):
        end = rng.randint(at + 1, len(text))
        at = value.feed(text[:end], at)
    return value.done, at


@settings(max_examples=200, deadline=None)
@given(values(), st.randoms(use_true_random=False), st.booleans(), st.sampled_from([None, 2]))
def test_json_values_end_where_they_end(value, rng, ascii_only, indent):
    text = json.dumps(value, ensure_ascii=ascii_only, indent=indent)
    done, at = read(text + ",", rng)
    assert (done, at) == (True, len(text))


@settings(max_examples=400, deadline=None)
@given(values(), st.randoms(use_true_random=False), st.sampled_from([*'{}[],:"\\x0-.e\n', ""]), st.data())
def test_what_pythons_reader_refuses_is_refused(value, rng, insert, data):
    text = json.dumps({"a": value})
    at = data.draw(st.integers(0, len(text)))
    text = text[:at] + insert + text[at + data.draw(st.integers(0, 1)) :]
    done, end = read(text, rng)
    try:
        json.loads(text, parse_constant=lambda name: 1 / 0)
        good = True
    except (ValueError, ZeroDivisionError):
        good = False
    if good:
        assert done
    elif done:
        assert end < len(text), "more behind a whole value"


@pytest.mark.parametrize(
    ("template", "model_type", "dialect"),
    [
        ("{% if tools %}<tool_call>", "qwen2", HERMES),
        ("{% if tools %}<tool_call>\n<function=x>", "qwen3", NONE),
        ("{% if tools %}<tool_call>\n<function=x>\n<parameter=", "qwen3", QWEN3_CODER),
        ("{% if tools %}<other:tool_call>\n<function=x>\n<parameter=", "qwen3", NONE),
        ("{% if tools %}<seed:tool_call>\n<function=x>\n<parameter=", "seed_oss", SEED_OSS),
        ("{% if tools %}<tool_call>\n<invoke name=", "other", NONE),
        ("{% if tools %}<tool_calls>[{<tool_call>", "other", NONE),
        ("{% if tools %}{{ '<|tool_call>call:' }}", "gemma4", GEMMA4),
        ("{% if tools %}<|START_ACTION|>", "cohere2", COMMAND),
        ("{% if tools %}write <|tool_call|> and a list", "granite", GRANITE),
        ("{{ '<｜tool▁calls▁begin｜>' }}", "deepseek_v3", DEEPSEEK_V31),
        ("{% if tools %}{{ '<|python_tag|>' }}", "llama", LLAMA3),
        ("{% if tools %}<｜tool▁calls▁begin｜>\n```json", "qwen3", DEEPSEEK_V3),
        ("{% if tools %}<｜tool▁calls▁begin｜>", "qwen3", DEEPSEEK_V31),
        ("{% if tools %}[TOOL_CALLS]", "llama", MISTRAL),
        ("{% if tools %}<|tool_calls_section_begin|>", "kimi_k2", KIMI_K2),
        ("{% if tools %}<tool_call>{name}\n<arg_key>{key}</arg_key>\n<arg_value>", "glm4_moe", GLM45),
        ("{% if tools %}<tool_call>{name}<arg_key>{key}</arg_key><arg_value>", "glm4_moe", GLM47),
        ("{% if tools %}<tool_call>{name}<tool_sep>\n<arg_key>{key}</arg_key>\n<arg_value>", "hunyuan", NONE),
        ("{% if tools %}{{ tools | tojson }}", "llama", LLAMA3),
        ("{% if tools %}{{ tools | tojson }}", "phi3", NONE),
        ("{{ messages }}<tool_call>", "llama", NONE),
    ],
)
def test_the_template_tells_the_dialect(template, model_type, dialect):
    assert detect_tools(template, model_type) == dialect


def test_the_template_tells_whether_a_model_reasons():
    assert detect_reasoning("{{ content.split('</think>') }}") == "think"
    assert detect_reasoning("{{ messages }}") == NONE
    assert detect_reasoning("<|START_THINKING|>") == "command"
    assert detect_reasoning("[THINK] hm [/THINK]") == "mistral"
    assert detect_reasoning("{{ '<seed:think>' }}") == "seed_oss"
    assert detect_reasoning("{{ '<|channel>thought' }}") == "gemma4"


@pytest.mark.parametrize("name", MARKERS)
def test_each_dialect_of_reasoning(name):
    markers = MARKERS[name]
    text = f"{markers.open}\nso </ [ it <\n\nis {markers.close}\n\nYes {markers.close}"
    for parts in ([text], list(text), *([text[:at], text[at:]] for at in range(len(text)))):
        pieces = in_pieces(ReplyParser(None, ReasoningSplitter(False, markers)), parts)
        assert pieces == [Piece(REASONING, "so </ [ it <\n\nis"), Piece(CONTENT, f"Yes {markers.close}")]
    opened = in_pieces(ReplyParser(None, ReasoningSplitter(True, markers)), [text.removeprefix(markers.open)])
    assert [piece.kind for piece in opened] == [REASONING, CONTENT]
    assert text[: reasoning_end(text, markers.close)].endswith("is")


def test_call_ids():
    assert len({id_of_call(HERMES, os.urandom(12)) for _ in range(100)}) == 100
    assert all(len(one) == 9 and one.isalnum() for one in (id_of_call(MISTRAL, os.urandom(12)) for _ in range(100)))


def test_call_numbers():
    numbers = CallNumbers()
    written = [
        ("a", "functions.a:0"),
        ("b", "functions.b:1"),
        ("b", ""),
        ("a", "call_1"),
        ("a", "functions.a:1"),
        ("a", "functions.b:9"),
    ]
    assert [numbers.id_of(*each) for each in written] == [
        *("functions.a:0", "functions.b:1", "functions.b:2", "functions.a:3", "functions.a:4", "functions.a:5"),
    ]
    assert [numbers.id_of("a", f"functions.a:{each}") for each in ("8", "8", "1" * 5000, "x")] == [
        *("functions.a:8", "functions.a:9", "functions.a:10", "functions.a:11"),
    ]
    assert CallNumbers(5).id_of("a", "functions.a:0") == "functions.a:5"


def test_the_id_that_the_model_wrote_comes_with_the_call():
    text = numbered(("functions.get_weather:3", "{}"), ("search:1", "{}"))
    assert [piece for piece in in_pieces(parser(KIMI_K2), list(text)) if piece.kind == CALL] == [
        Piece(CALL, "get_weather", 0, "functions.get_weather:3"),
        Piece(CALL, "search", 1, "search:1"),
    ]
