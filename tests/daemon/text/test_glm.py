"""GLM's calls, whose strings stand without quotes: whole, in every cut, damaged, with and without line breaks."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daemon.text.reply_parser import Reply, ReplyParser, parse_whole
from daemon.text.tool_parsers.pieces import ARGUMENTS
from daemon.text.tool_parsers.registry import GLM45, GLM47, tool_parser
from tests.daemon.text.test_qwen3_coder import SCHEMA, reads_damaged, reads_in_every_cut

OPEN, CLOSE = "<tool_call>", "</tool_call>"


def parser(one_call: bool = False) -> ReplyParser:
    schemas = [json.dumps(SCHEMA).encode(), b"{}"]
    return ReplyParser(tool_parser(GLM45, ["edit", "search"], schemas), None, one_call)


def call(dialect: str, name: str, *arguments: tuple[str, str]) -> str:
    """Returns a call as the models of a dialect write it."""
    line = "\n" if dialect == GLM45 else ""
    written = "".join(f"<arg_key>{key}</arg_key>{line}<arg_value>{value}</arg_value>{line}" for key, value in arguments)
    return f"{OPEN}{name}{line}{written}{CLOSE}"


def edit(**values: str) -> str:
    return call(GLM47, "edit", *values.items())


def lines(**values: str) -> str:
    return call(GLM45, "edit", *values.items())


# text, content, arguments of the calls
REPLIES: dict[str, tuple[str, str, list[dict[str, Any]]]] = {
    "lines": (f"I edit.\n{lines(path='a b.py', line='3')}", "I edit.", [{"path": "a b.py", "line": 3}]),
    "no lines": (f"I edit.{edit(path='a b.py', line='3')}", "I edit.", [{"path": "a b.py", "line": 3}]),
    "two and text": (f"{lines(line='1')}\n{lines(line='2')} done", " done", [{"line": 1}, {"line": 2}]),
    "a string is left as it is": (edit(path='\n\tx = "é" \\ <b> </a\n'), "", [{"path": '\n\tx = "é" \\ <b> </a\n'}]),
    "empty strings": (lines(path="", note=""), "", [{"path": "", "note": ""}]),
    "no arguments": (call(GLM45, "edit") + call(GLM47, "edit"), "", [{}, {}]),
    "blanks between the tags": (f"{OPEN} edit {edit(line='3')[15:]}".replace("><", "> <"), "", [{"line": 3}]),
    "values as JSON": (
        lines(line="-2", ratio="1.50", deep="[1, {\n}]", any='{"a": "b"}', other="[1]"),
        "",
        [{"line": -2, "ratio": 1.5, "deep": [1, {}], "any": {"a": "b"}, "other": [1]}],
    ),
    "strings that look like JSON": (edit(path="12", note="12", kind="null"), "", [{"path": "12", "note": "12", "kind": "null"}]),
    "what is not of its type": (edit(line="three", other="x y"), "", [{"line": "three", "other": "x y"}]),
    "unknown tool": (call(GLM45, "f", ("a", "1"), ("b", "c")), "", [{"a": 1, "b": "c"}]),
    "no closing marker": (f"So {lines(line='1')[:-12]}{edit(line='2')[:-12]}", "So", [{"line": 1}, {"line": 2}]),
    "no call": (f"{OPEN} is a tag, {OPEN}{{}}{CLOSE} <tool_cal", f"{OPEN} is a tag, {OPEN}{{}}{CLOSE} <tool_cal", []),
    "a name alone": (f"{OPEN}edit", f"{OPEN}edit", []),
    "no name": (f"{OPEN}<arg_key>a</arg_key>", f"{OPEN}<arg_key>a</arg_key>", []),
    "no key": (call(GLM47, "edit", ("", "1")), call(GLM47, "edit", ("", "1")), []),
    "no value": (f"{OPEN}edit<arg_key>a</arg_key>{CLOSE}", f"{OPEN}edit<arg_key>a</arg_key>{CLOSE}", []),
    "text in a call": (f"{OPEN}edit\nwell{CLOSE}", f"{OPEN}edit\nwell{CLOSE}", []),
    "unfinished": (edit(path="a")[:-25], edit(path="a")[:-25], []),
    "half a closing marker": (edit(path="a")[:-3], edit(path="a")[:-3], []),
    "a call where a key should be": (f"{OPEN}edit<arg_key>{edit(line='1')}", f"{OPEN}edit<arg_key>", [{"line": 1}]),
    "a call in a key": (f"{OPEN}edit<arg_key>a{edit(line='1')}", f"{OPEN}edit<arg_key>a{edit(line='1')}", []),
}  # fmt: skip


@pytest.mark.parametrize("name", REPLIES)
def test_a_reply_in_every_cut(name):
    reads_in_every_cut(parser, *REPLIES[name])


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(sorted(REPLIES)), st.booleans(), st.data())
def test_damaged_text_gives_the_same_in_any_cuts_and_loses_nothing(name, cut, data):
    reads_damaged(parser, REPLIES[name][0], ["", "<", ">", "\n", "</arg_value>", OPEN, CLOSE, "é"], cut, data)


def test_a_strings_text_streams():
    reading = parser()
    pieces = [piece for char in lines(path="hello") for piece in reading.add(char) if piece.kind == ARGUMENTS]
    assert [piece.text for piece in pieces] == ["{", '"path": "', *"hello", '"', "}"]


def test_a_call_cut_off_by_max_tokens_stays_a_call():
    text = edit(path="hello").partition("lo")[0]
    assert parse_whole(parser(), text, cut=True) == Reply(calls=[("edit", '{"path": "hel')])


def test_one_call_only():
    reply = parse_whole(parser(one_call=True), edit(line="1") + edit(line="2"), cut=False)
    assert reply == Reply(calls=[("edit", '{"line": 1}')])
