"""Replies in Harmony, the format of gpt-oss: whole, token by token, in any cut, and damaged."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daemon.text.header_tokens import HeaderTokens
from daemon.text.reply_parser import Reply, ReplyParser, parse_whole
from daemon.text.tool_parsers.harmony import MARKS, HarmonyParser, reasoning_end
from daemon.text.tool_parsers.pieces import ARGUMENTS, BROKEN, CALL, CALL_END, CONTENT, REASONING, Piece
from tests.daemon.text.test_reply_parser import SEARCH, WEATHER, in_pieces, split

TOKEN = re.compile("|".join(map(re.escape, MARKS)))


def marked(text: str) -> str:
    """The text as the parser gets it: each special token is one character."""
    return TOKEN.sub(lambda found: MARKS[found[0]], text)


def parser(one_call: bool = False, **options: object) -> ReplyParser:
    return ReplyParser(HarmonyParser(["get_weather", "search"], **options), None, one_call)  # type: ignore[arg-type]


THINKS = "<|channel|>analysis<|message|>They ask.\nSo <|end|>"
AGAIN = "<|start|>assistant"
CALLS = f"<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{WEATHER}"
ONE = [("get_weather", WEATHER)]
# text, the reply
REPLIES = {
    "answer": ("<|channel|>final<|message|> 4 \n<|return|>", Reply(" 4 \n")),
    "thought and answer": (f"{THINKS}{AGAIN}<|channel|>final<|message|>4<|return|>", Reply("4", "They ask.\nSo ")),
    "its end is no part": (f"{THINKS}{AGAIN}<|channel|>final<|message|>4", Reply("4", "They ask.\nSo ")),
    "two thoughts": (f"{THINKS}{AGAIN}{THINKS}", Reply("", "They ask.\nSo \n\nThey ask.\nSo ")),
    "call": (f"{CALLS}<|call|>", Reply(calls=ONE)),
    "thought and call": (f"{THINKS}{AGAIN}{CALLS}<|call|>", Reply("", "They ask.\nSo ", ONE)),
    "preamble and call": (
        f"{THINKS}{AGAIN}<|channel|>commentary<|message|>I look.<|end|>{AGAIN}{CALLS}<|call|>",
        Reply("I look.", "They ask.\nSo ", ONE),
    ),
    "preamble and answer": (
        f"<|channel|>commentary<|message|>I look.<|end|>{AGAIN}<|channel|>final<|message|>4<|return|>",
        Reply("I look.\n\n4"),
    ),
    "recipient in the role": (
        f"{THINKS}{AGAIN} to=functions.search<|channel|>commentary json<|message|>{SEARCH}<|call|>",
        Reply("", "They ask.\nSo ", [("search", SEARCH)]),
    ),
    "recipient first": (
        f" to=functions.search<|channel|>commentary json<|message|>{SEARCH}<|call|>",
        Reply(calls=[("search", SEARCH)]),
    ),
    "call on the analysis channel": (
        "<|channel|>analysis to=functions.search code<|message|>{}<|call|>",
        Reply(calls=[("search", "{}")]),
    ),
    "call without the namespace": ("<|channel|>commentary to=search<|message|>{}", Reply(calls=[("search", "{}")])),
    "no blank before the type": ("<|channel|>commentary to=functions.a<|constrain|>json<|message|>{}", Reply(calls=[("a", "{}")])),
    "call without arguments": ("<|channel|>commentary to=functions.a<|message|> <|call|>", Reply(calls=[("a", "{}")])),
    "two calls": (
        f"{CALLS}<|call|>{AGAIN}<|channel|>commentary to=functions.search json<|message|>{SEARCH}\n<|call|>",
        Reply(calls=[*ONE, ("search", SEARCH)]),
    ),
    "text behind a call": (f"{CALLS} so<|call|>", Reply("so", calls=ONE)),
    "built-in tool": (
        '<|channel|>analysis to=browser.search code<|message|>{"query": "x"}<|call|>',
        Reply("", 'to=browser.search {"query": "x"}'),
    ),
    "unknown recipient": ("<|channel|>commentary to=python<|message|>1 + 1<|call|>", Reply("to=python 1 + 1")),
    "bad name": ("<|channel|>commentary to=functions.<|message|>{}<|call|>", Reply("to=functions. {}")),
    "answer in json": ('<|channel|>final <|constrain|>json<|message|>{"a": 1}<|return|>', Reply('{"a": 1}')),
    "unknown channel": ("<|channel|>musing<|message|>Hm<|end|>", Reply("Hm")),
    "no channel": (f"{THINKS}{AGAIN}<|message|>4<|return|>", Reply("4", "They ask.\nSo ")),
    "no header": ("Just text. to=x", Reply("Just text. to=x")),
    "blank": (" \n ", Reply(" \n ")),
    "empty": ("", Reply()),
    "no end and no start": ("<|channel|>analysis<|message|>Hm<|channel|>final<|message|>4", Reply("4", "Hm")),
    "no end": (f"<|channel|>analysis<|message|>Hm{AGAIN}<|channel|>final<|message|>4", Reply("4", "Hm")),
    "text for a header": (f"{THINKS}{AGAIN} Well, 4.<|end|>", Reply("Well, 4.", "They ask.\nSo ")),
    "text in a header": ("<|channel|>final Well, 4.<|return|>", Reply("Well, 4.")),
    "a long text for a header": (f"{AGAIN}<|channel|>final {'Well, ' * 60}", Reply("Well, " * 60)),
    "text between": ("<|channel|>final<|message|>4<|end|>\n and 5", Reply("4\n\nand 5")),
    "header unfinished": (f"{THINKS}{AGAIN}<|channel|>fin", Reply("", "They ask.\nSo ")),
    "header unfinished early": (f"{THINKS}{AGAIN[:-4]}", Reply("", "They ask.\nSo ")),
    "recipient unfinished": ("<|channel|>commentary to=functions.se", Reply()),
    "not even to": ("<|channel|>commentary t", Reply()),
    "recipient first, unfinished": (" to=functions.se", Reply()),
    "not json": ("<|channel|>commentary to=functions.a<|message|>x = 1<|call|>", Reply("to=functions.a x = 1")),
    "broken json": ('<|channel|>commentary to=functions.a<|message|>{"x": 01} y<|call|>', Reply('to=functions.a {"x": 01} y')),
    "cut json": ('I<|channel|>commentary to=functions.a<|message|>{"x": "<|call|>', Reply('I\n\nto=functions.a {"x": "')),
    "stray marks": ("<|channel|>final<|message|>a<|message|>b<|constrain|>c<|end|><|end|><|constrain|>", Reply("abc")),
}  # fmt: skip


@pytest.mark.parametrize("name", REPLIES)
def test_a_reply_in_every_cut(name):
    text, reply = REPLIES[name]
    text = marked(text)
    assert parse_whole(parser(), text, cut=False) == reply
    whole = in_pieces(parser(), [text])
    assert in_pieces(parser(), list(text)) == whole
    for at in range(len(text)):
        assert in_pieces(parser(), [text[:at], text[at:]]) == whole
    assert text[: reasoning_end(text)].endswith("".join(piece.text for piece in whole if piece.kind == REASONING)[-9:])


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.sampled_from(sorted(REPLIES)), st.booleans(), st.data())
def test_damaged_replies_give_the_same_in_any_cuts_and_lose_no_words(name, cut, data):
    text = marked(REPLIES[name][0])
    at, end = sorted((data.draw(st.integers(0, len(text))), data.draw(st.integers(0, len(text)))))
    text = text[:at] + data.draw(st.sampled_from(["", "{", '"', " to=", "é\n", *MARKS.values()])) + text[end:]
    points = data.draw(st.lists(st.integers(0, len(text)), max_size=8))
    whole = in_pieces(parser(), [text], cut)
    assert in_pieces(parser(), split(text, points), cut) == whole
    reply = parse_whole(parser(), text, cut)
    shown = reply.content + reply.reasoning + "".join(name + arguments for name, arguments in reply.calls)
    mark = f"[{''.join(MARKS.values())}]"
    assert not re.search(mark, shown)
    joined = re.sub(mark, "", text)  # a mark within a word is left out of it
    for word in ("They ask.", "I look.", "Well, 4."):
        assert text.count(word) <= shown.count(word) <= joined.count(word)
    if not cut:
        assert all(isinstance(json.loads(arguments), dict) for _, arguments in reply.calls)


def test_what_streams():
    text = f"<|channel|>commentary<|message|>Hm <|end|>{AGAIN}<|channel|>commentary to=functions.a json<|message|>{{1<|call|>"
    reading = parser()
    pieces = [reading.add(char) for char in marked(text)]
    assert [piece for each in pieces for piece in each] == [
        Piece(CONTENT, "H"),
        Piece(CONTENT, "m"),
        Piece(CALL, "a"),
        Piece(ARGUMENTS, "{"),
        Piece(BROKEN, " \n\nto=functions.a {"),
        Piece(CONTENT, "1"),
    ]
    assert pieces[marked(text).index("{") - 1] == [Piece(CALL, "a")], "the name is told with the header's end"
    assert [piece.kind for piece in in_pieces(parser(), [marked(f"{CALLS}<|call|>")])] == [CALL, ARGUMENTS, CALL_END]


@pytest.mark.parametrize("rest", ["", " ", '{"q": "x'])
def test_a_call_cut_off_by_max_tokens_stays_a_call(rest):
    text = marked(f"<|channel|>commentary to=functions.search<|message|>{rest}")
    reading = parser()
    assert parse_whole(reading, text, cut=True) == Reply(calls=[("search", rest.strip())])
    assert reading.num_calls == 0


def test_without_tools_and_without_reasoning_all_is_content():
    text = marked(f"{THINKS}{AGAIN}{CALLS}<|call|>")
    assert parse_whole(parser(calls=False), text, False) == Reply(f"to=functions.get_weather {WEATHER}", "They ask.\nSo ")
    assert parse_whole(parser(reasoning=False), text, False) == Reply("They ask.\nSo", calls=ONE)


def test_one_call_only():
    reading = parser(one_call=True)
    assert parse_whole(reading, marked(f"{REPLIES['two calls'][0]}{AGAIN}{THINKS}"), False) == Reply("", "They ask.\nSo ", ONE)
    assert reading.num_calls == 1


@pytest.mark.parametrize(
    ("prompt", "text", "reply"),
    [
        (f"hi<|end|>{AGAIN}", f"{THINKS}{AGAIN}<|channel|>final<|message|>4", Reply("4", "They ask.\nSo ")),
        (f"hi<|end|>{AGAIN}", "Plain.", Reply("Plain.")),
        (f"{AGAIN}<|channel|>analysis<|message|>", f"Hm<|end|>{AGAIN}<|channel|>final<|message|>4", Reply("4", "Hm")),
        (f"{AGAIN}<|channel|>final<|message|>So ", "far.", Reply("far.")),
        (f"{AGAIN}<|channel|>", "final<|message|>4", Reply("4")),
        (f"{AGAIN} to=functions.search<|channel|>commentary json<|message|>", "{}<|call|>", Reply(calls=[("search", "{}")])),
        ("<|start|>user<|message|>hi<|end|>", f"{AGAIN}<|channel|>final<|message|>4", Reply("4")),
        ("cut off", "<|channel|>final<|message|>4", Reply("4")),
    ],
)
def test_the_prompt_may_have_begun_a_message(prompt, text, reply):
    assert parse_whole(parser(prompt=marked(prompt)), marked(text), False) == reply


def test_a_continued_answer():
    text = marked("2 + 2 = 4<|end|><|start|>assistant<|channel|>analysis<|message|>Hm")
    for prompt in ("no start in sight", "<|start|>assistant<|channel|>final<|message|>So: "):
        assert parse_whole(parser(prompt=marked(prompt), in_answer=True), text, False) == Reply("2 + 2 = 4", "Hm")


def test_a_model_that_writes_about_the_format():
    text = "<|start|>assistant<|channel|>analysis<|message|>Hm<|end|>"
    assert parse_whole(parser(), MARKS["<|message|>"] + text, False) == Reply(text)


def test_which_tokens_are_headers():
    text = "a<|channel|>analysis <|constrain|>json<|message|>Hm<|constrain|>so<|end|>b<|start|>assistant<|message|>4<|return|>"
    tokens = re.split(f"({TOKEN.pattern})", text)
    marks = {at: MARKS[token] for at, token in enumerate(tokens) if token in MARKS}
    headers = HeaderTokens(marks)
    assert "".join(token for at, token in enumerate(tokens) if not headers.covers(at)) == "aHmsob4"
