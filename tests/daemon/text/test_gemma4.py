"""Gemma 4's calls, whose strings stand between tokens of their own: whole, in every cut, damaged, and any value."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daemon.text.reasoning import GEMMA4 as GEMMA4_REASONING
from daemon.text.reasoning import MARKERS, ReasoningSplitter, detect_reasoning
from daemon.text.reply_parser import Reply, ReplyParser, parse_whole
from daemon.text.tool_parsers.pieces import CONTENT, REASONING
from daemon.text.tool_parsers.registry import GEMMA4, detect_tools, tool_parser
from tests.daemon.text.test_qwen3_coder import reads_damaged, reads_in_every_cut
from tests.daemon.text.test_reply_parser import in_pieces

QUOTE = '<|"|>'


def parser() -> ReplyParser:
    return ReplyParser(tool_parser(GEMMA4, ["look", "search"]), None)


def value(given: Any) -> str:
    """Returns a value as Gemma 4's chat template writes it."""
    if isinstance(given, str):
        return QUOTE + given + QUOTE
    if isinstance(given, dict):
        return "{" + ",".join(f"{key}:{value(each)}" for key, each in given.items()) + "}"
    if isinstance(given, list):
        return "[" + ",".join(map(value, given)) + "]"
    return json.dumps(given)


def call(name: str, arguments: dict[str, Any]) -> str:
    return f"<|tool_call>call:{name}{value(arguments)}<tool_call|>"


CITY = {"city": 'Köln "am" {Rhein}, [a:b] \\ \n <|', "days": [1, 2.5e3, -0.5, None, True], "u": {"a": {}, "b": []}}
# text, the reply with its arguments as values; None: no call
REPLIES: dict[str, tuple[str, str, list[tuple[str, Any]]]] = {
    "one": (call("look", CITY), "", [("look", CITY)]),
    "two": (call("look", CITY) + call("search", {}), "", [("look", CITY), ("search", {})]),
    "text before": (f"I look.\n{call('search', {'q': ''})}", "I look.", [("search", {"q": ""})]),
    "text behind": (f"{call('search', {})} Done", " Done", [("search", {})]),
    "blanks": (f"<|tool_call> call: look {{ a : 1 , b : {QUOTE}x{QUOTE} }} <tool_call|>", "", [("look", {"a": 1, "b": "x"})]),
    "not closed": ("<|tool_call>call:look{a:1}", "", [("look", {"a": 1})]),
    "quoted keys": (f"<|tool_call>call:look{{{QUOTE}a b{QUOTE}:1}}<tool_call|>", "", [("look", {"a b": 1})]),
    "a comma at the end": ("<|tool_call>call:look{a:[1,],}<tool_call|>", "", [("look", {"a": [1]})]),
    "words without quotes": (
        "<|tool_call>call:look{a:New York,b:[x, 2],c:None}<tool_call|>",
        "",
        [("look", {"a": "New York", "b": ["x", 2], "c": None})],
    ),
}
NO_CALLS = (
    "<|tool_call>look{}<tool_call|>",
    "<|tool_call>call:{a:1}<tool_call|>",
    "<|tool_call>call:look(a=1)<tool_call|>",
    '<|tool_call>call:look{a:"x"}<tool_call|>',
    "<|tool_call>call:look{a:}<tool_call|>",
    "<|tool_call>call:look{a:{b}}<tool_call|>",
    "<|tool_call>call:look{:1}<tool_call|>",
    f"<|tool_call>call:look{{a:{QUOTE}x",
    "<|tool_call>",
    "a <|tool_cal",
)


@pytest.mark.parametrize("name", REPLIES)
def test_replies(name: str) -> None:
    text, content, calls = REPLIES[name]
    reads_in_every_cut(parser, text, content, [arguments for _, arguments in calls])
    assert [each for each, _ in parse_whole(parser(), text, cut=False).calls] == [each for each, _ in calls]


@pytest.mark.parametrize("text", NO_CALLS)
def test_what_is_no_call_is_content(text: str) -> None:
    assert parse_whole(parser(), text, cut=False) == Reply(text)
    assert in_pieces(parser(), list(text)) == in_pieces(parser(), [text])


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_damaged_text_gives_the_same_in_any_cuts_and_loses_nothing(data: st.DataObject) -> None:
    text, _, _ = REPLIES[data.draw(st.sampled_from(sorted(REPLIES)))]
    inserted = ["", "<", "[", "{", "}", ":", QUOTE, "x", ",", "é\n"]
    reads_damaged(parser, text, inserted, data.draw(st.booleans()), data)


def values() -> st.SearchStrategy[Any]:
    texts = st.text(max_size=8).filter(lambda text: QUOTE not in text and not text.endswith(("<", "<|", '<|"', '<|"|')))
    keys = st.from_regex(r"[A-Za-z_][A-Za-z0-9_.-]{0,8}", fullmatch=True)
    scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts
    return st.recursive(
        scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=4), max_leaves=12
    )


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(st.from_regex(r"[a-z_]{1,6}", fullmatch=True), values(), max_size=4))
def test_any_values_are_read_as_they_were_written(arguments: dict[str, Any]) -> None:
    reply = parse_whole(parser(), call("look", arguments), cut=False)
    assert [(name, json.loads(each)) for name, each in reply.calls] == [("look", arguments)]


def test_a_call_cut_off_by_max_tokens_stays_a_call() -> None:
    reply = parse_whole(parser(), f"<|tool_call>call:look{{a:{QUOTE}x", cut=True)
    assert [name for name, _ in reply.calls] == ["look"]


def test_reasoning() -> None:
    text = f"<|channel>thought\nI look.\n<channel|>Yes {call('search', {})}"
    for parts in ([text], list(text)):
        reading = ReplyParser(tool_parser(GEMMA4, ["search"]), ReasoningSplitter(False, MARKERS[GEMMA4_REASONING]))
        pieces = in_pieces(reading, parts)
        assert [piece.text for piece in pieces if piece.kind == REASONING] == ["I look."]
        assert [piece.text for piece in pieces if piece.kind == CONTENT] == ["Yes"]
    template = "{% if tools %}<|tool_call>call:{% endif %}<|channel>thought\n<channel|>"
    assert (detect_tools(template, "gemma4"), detect_reasoning(template)) == (GEMMA4, GEMMA4_REASONING)
