"""Qwen3-Coder's calls, whose arguments are plain text: whole, in every cut, damaged, and what a grammar lets a model write."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daemon.text.reply_parser import Reply, ReplyParser, parse_whole
from daemon.text.tool_parsers.pieces import ARGUMENTS, CONTENT
from daemon.text.tool_parsers.registry import NONE, QWEN3_CODER, SEED_OSS, detect_tools, tool_parser
from tests.daemon.text.test_reply_parser import in_pieces, split

SCHEMA = {
    "type": "object",
    "properties": {
        "path": {"type": "string"},
        "line": {"type": "integer"},
        "ratio": {"type": "number"},
        "deep": {"anyOf": [{"type": "boolean"}, {"$ref": "#/$defs/list"}]},
        "note": {"type": ["string", "null"]},
        "kind": {"enum": ["a", "b"]},
        "any": {},
    },
    "$defs": {"list": {"type": "array"}},
}
OPEN, CLOSE = "<tool_call>\n<function=edit>\n", "</function>\n</tool_call>"


def parser(one_call: bool = False) -> ReplyParser:
    schemas = [json.dumps(SCHEMA).encode(), b"{}"]
    return ReplyParser(tool_parser(QWEN3_CODER, ["edit", "search"], schemas), None, one_call)


def parameter(key: str, value: str) -> str:
    return f"<parameter={key}>\n{value}\n</parameter>\n"


def edit(**values: str) -> str:
    return OPEN + "".join(parameter(key, value) for key, value in values.items()) + CLOSE


# text, content, arguments of the calls
REPLIES: dict[str, tuple[str, str, list[dict[str, Any]]]] = {
    "one": (f"I edit.\n{edit(path='a b.py', line='3')}", "I edit.", [{"path": "a b.py", "line": 3}]),
    "two and text": (f"{edit(line='1')}\n{edit(line='2')} done", " done", [{"line": 1}, {"line": 2}]),
    "lines": (edit(path='\n\tx = "é" \\ <b> </p\n\n'), "", [{"path": '\n\tx = "é" \\ <b> </p\n\n'}]),
    "empty values": (edit(path="", note=""), "", [{"path": "", "note": ""}]),
    "on one line": (f"{OPEN}<parameter=path>a</parameter><parameter=line>4</parameter>{CLOSE}", "", [{"path": "a", "line": 4}]),
    "no parameters": (OPEN + CLOSE, "", [{}]),
    "values as JSON": (
        edit(line="-2", ratio="1.50", deep=" [1, {\n}] ", any='{"a": "b"}'),
        "",
        [{"line": -2, "ratio": 1.5, "deep": [1, {}], "any": {"a": "b"}}],
    ),
    "values as Python": (edit(deep="True", note="None", any="'x'"), "", [{"deep": True, "note": None, "any": "'x'"}]),
    "strings that look like JSON": (
        edit(path="12", note="12", kind="null", other="[1]"),
        "",
        [{"path": "12", "note": "12", "kind": "null", "other": "[1]"}],
    ),
    "what is not of its type": (edit(line="three", deep='"x'), "", [{"line": "three", "deep": '"x'}]),
    "unknown tool": (f"<tool_call><function=f>{parameter('a', '1')}{CLOSE}", "", [{"a": "1"}]),
    "no closing marker": (f"{edit(line='1')[:-12]}{edit(line='2')}", "", [{"line": 1}, {"line": 2}]),
    "no opening marker": (f"So:\n{edit(line='1')[12:]}", "So:", [{"line": 1}]),
    "another's tag": ("Write <function=foo> or <functional", "Write <function=foo> or <functional", []),
    "no call": ("<tool_call>{}</tool_call> <tool_cal", "<tool_call>{}</tool_call> <tool_cal", []),
    "text in a call": (f"{OPEN}well{CLOSE}", f"{OPEN}well{CLOSE}", []),
    "no name": (f"<tool_call><function=>{CLOSE}", f"<tool_call><function=>{CLOSE}", []),
    "no key": (f"{OPEN}<parameter=>{CLOSE}", f"{OPEN}<parameter=>{CLOSE}", []),
    "unfinished": (f"{OPEN}<parameter=path>\na\n", f"{OPEN}<parameter=path>\na\n", []),
}  # fmt: skip


def seeded(text: str) -> str:
    """Returns a reply in Qwen3-Coder's dialect as Seed-OSS writes it: with other tags, and values without line breaks."""
    text = text.replace("<tool_call>", "<seed:tool_call>").replace("</tool_call>", "</seed:tool_call>")
    return re.sub(r"(<parameter=[^>\n]*>)\n((?s:.*?))\n</parameter>", r"\1\2</parameter>", text)


def reads_in_every_cut(parser: Callable[[], ReplyParser], text: str, content: str, calls: list[Any]) -> None:
    """Asserts what a reply is read as, and that it is read alike whole, in any two parts and character by character."""
    reply = parse_whole(parser(), text, cut=False)
    assert (reply.content, [json.loads(arguments) for _, arguments in reply.calls]) == (content, calls)
    whole = in_pieces(parser(), [text])
    assert in_pieces(parser(), list(text)) == whole
    for at in range(len(text)):
        assert in_pieces(parser(), [text[:at], text[at:]]) == whole


def without(text: str, markers: tuple[str, ...]) -> str:
    while any(marker in text for marker in markers):
        for marker in markers:
            text = text.replace(marker, "")
    return text


def reads_damaged(
    parser: Callable[[], ReplyParser], text: str, inserted: list[str], cut: bool, data: st.DataObject, hidden: tuple[str, ...] = ()
) -> None:
    """Puts one of `inserted` in place of a part of a reply, and asserts that it is read alike in any parts and loses nothing but
    the markers that do not show, `hidden`."""
    at, end = sorted((data.draw(st.integers(0, len(text))), data.draw(st.integers(0, len(text)))))
    text = text[:at] + data.draw(st.sampled_from(inserted)) + text[end:]
    points = data.draw(st.lists(st.integers(0, len(text)), max_size=8))
    assert in_pieces(parser(), split(text, points), cut) == in_pieces(parser(), [text], cut)
    reply = parse_whole(parser(), text, cut=False)
    assert reply.calls or without(reply.content, hidden) == without(text, hidden)
    assert all(isinstance(json.loads(arguments), dict) for _, arguments in reply.calls)


@pytest.mark.parametrize("name", REPLIES)
def test_a_reply_in_every_cut(name):
    reads_in_every_cut(parser, *REPLIES[name])


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(sorted(REPLIES)), st.booleans(), st.data())
def test_damaged_text_gives_the_same_in_any_cuts_and_loses_nothing(name, cut, data):
    reads_damaged(parser, REPLIES[name][0], ["", "<", ">", "\n", "</parameter>", OPEN, "é"], cut, data)


SEEDED = ("one", "two and text", "no parameters", "values as JSON", "values as Python", "unknown tool", "no opening marker")


@pytest.mark.parametrize("name", SEEDED)
def test_seed_oss(name):
    schemas = [json.dumps(SCHEMA).encode(), b"{}"]
    text, content, calls = REPLIES[name]
    reads_in_every_cut(
        lambda: ReplyParser(tool_parser(SEED_OSS, ["edit", "search"], schemas), None), seeded(text), seeded(content), calls
    )


def test_a_dict_of_python_is_read_where_no_string_may_be():
    text = edit(deep="[1, 'a', None]", any="{'x': 1}", line="[")
    calls = parse_whole(parser(), text, cut=False).calls
    assert [json.loads(arguments) for _, arguments in calls] == [{"deep": [1, "a", None], "any": "{'x': 1}", "line": "["}]


def test_a_strings_text_streams():
    reading = parser()
    pieces = [piece for char in edit(path="hello") for piece in reading.add(char) if piece.kind == ARGUMENTS]
    assert [piece.text for piece in pieces] == ["{", '"path": "', *"hello", '"', "}"]


def test_a_call_cut_off_by_max_tokens_stays_a_call():
    text = edit(path="hello").partition("lo")[0]
    assert parse_whole(parser(), text, cut=True) == Reply(calls=[("edit", '{"path": "hel')])
    assert [piece.kind for piece in in_pieces(parser(), [text])][-1] != CONTENT


def test_one_call_only():
    reply = parse_whole(parser(one_call=True), edit(line="1") + edit(line="2"), cut=False)
    assert reply == Reply(calls=[("edit", '{"line": 1}')])


@pytest.mark.parametrize(
    ("template", "dialect"),
    [
        ("{{ tools }}<tool_call>\n<function=x>\n<parameter=y>", QWEN3_CODER),
        ("{{ tools }}<function=x>{}</function>", NONE),
        ("<function=x><parameter=y>", NONE),
    ],
)
def test_the_template_tells_the_dialect(template, dialect):
    assert detect_tools(template, "qwen3_moe") == dialect
