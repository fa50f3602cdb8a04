"""gpt-oss's replies at each endpoint, streamed and whole, with replies written by hand."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from daemon.text.jobs import TextFacts
from daemon.text.tool_parsers.harmony import CALL, CHANNEL, CONSTRAIN, END, MARKS, MESSAGE, START
from engine.protocol import FINISH_LENGTH, FINISH_NONE, FINISH_STOP
from tests.daemon.api.fakes import EOS, WORDS, Node, Script, entry, serve
from tests.daemon.api.test_tools import MESSAGES, TOOLS, ask, calls_of, put_together, stream

IDS = {257: START, 258: END, 259: MESSAGE, 260: CHANNEL, 261: CONSTRAIN, 1: CALL}
FACTS = TextFacts("harmony", "harmony", harmony_marks=IDS)
KOELN = '{"city": "Köln \\"x\\""}'
THINKS = "<|channel|>analysis<|message|>Hm, so.<|end|><|start|>assistant"
CALLS = f"<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{KOELN}"
# reply, what ends it, (content, reasoning, calls, finish_reason)
REPLIES: dict[str, tuple[str, int, tuple[str | None, str, list[tuple[str, str]], str]]] = {
    "answer": (f"{THINKS}<|channel|>final<|message|>Four é", FINISH_STOP, ("Four é", "Hm, so.", [], "stop")),
    "call": (f"{THINKS}{CALLS}", FINISH_STOP, (None, "Hm, so.", [("get_weather", KOELN)], "tool_calls")),
    "preamble": (
        f"{THINKS}<|channel|>commentary<|message|>I look.<|end|><|start|>assistant{CALLS}",
        FINISH_STOP,
        ("I look.", "Hm, so.", [("get_weather", KOELN)], "tool_calls"),
    ),
    "cut within the analysis": (THINKS.partition("<|end|>")[0], FINISH_LENGTH, (None, "Hm, so.", [], "length")),
    "cut within a header": (f"{THINKS}<|channel|>comm", FINISH_LENGTH, (None, "Hm, so.", [], "length")),
    "cut within a call": (f"{THINKS}{CALLS[:-5]}", FINISH_LENGTH, (None, "Hm, so.", [("get_weather", KOELN[:-5])], "length")),
    "broken call": (f"{THINKS}{CALLS[:-5]}", FINISH_STOP, (f"to=functions.get_weather {KOELN[:-5]}", "Hm, so.", [], "stop")),
    "built-in tool": ("<|channel|>analysis to=python code<|message|>1", FINISH_STOP, (None, "to=python 1", [], "stop")),
}  # fmt: skip


def script(text: str, finish: int = FINISH_STOP, end: int = EOS) -> Script:
    """One token a step: a special one, or a byte."""
    ids: list[int] = []
    known = {MARKS[name]: name for name in MARKS}
    names = {known[mark]: token_id for token_id, mark in IDS.items()}
    for part in re.split("(" + "|".join(map(re.escape, names)) + ")", text):
        ids += [names[part]] if part in names else part.encode()
    return [*(([each], FINISH_NONE) for each in ids), ([end], finish) if finish == FINISH_STOP else ([], finish)]


@contextlib.asynccontextmanager
async def harmony_node(
    text: str, finish: int = FINISH_STOP, facts: TextFacts = FACTS, end: int = EOS, **changes: Any
) -> AsyncIterator[Node]:
    """A node whose model writes this."""
    async with serve(lambda _: script(text, finish, end), models=[entry(**changes)]) as node:
        node.text.known_facts = facts
        yield node


@pytest.mark.parametrize("name", REPLIES)
async def test_chats(name):
    text, finish, expected = REPLIES[name]
    content, reasoning, calls, reason = expected
    async with harmony_node(text, finish) as node:
        whole = await ask(node)
        assert (whole.message.content, whole.message.reasoning_content or "") == (content, reasoning)
        assert (calls_of(whole.message), whole.finish_reason) == (calls, reason)
        choices = await stream(node)
        if name == "broken call":  # its name and arguments were out
            told = put_together(choices)
            assert (told[0], told[1], told[3]) == (content, reasoning, reason)
        else:
            assert put_together(choices) == expected


async def test_other_endpoints():
    text, _, _ = REPLIES["preamble"]
    tool = {"name": "get_weather", "input_schema": {"type": "object"}}
    flat = {"type": "function", **TOOLS[0]["function"]}
    bodies: dict[str, dict[str, Any]] = {
        "/v1/messages": {"model": "tiny", "max_tokens": 999, "messages": MESSAGES, "tools": [tool]},
        "/v1/responses": {"model": "tiny", "input": "hi", "tools": [flat]},
        "/api/chat": {"model": "tiny", "messages": MESSAGES, "tools": [TOOLS[0]], "stream": False},
    }
    async with harmony_node(text) as node, aiohttp.ClientSession(node.url) as http:
        answers, streams = {}, {}
        for path, body in bodies.items():
            async with http.post(path, json=body) as answer:
                answers[path] = await answer.json()
            async with http.post(path, json=body | {"stream": True}) as answer:
                streams[path] = (await answer.read()).decode()
    message, response, chat = answers.values()
    assert [(each["type"], each.get("thinking") or each.get("text") or each.get("input")) for each in message["content"]] == [
        ("thinking", "Hm, so."), ("text", "I look."), ("tool_use", json.loads(KOELN)),
    ]  # fmt: skip
    assert message["stop_reason"] == "tool_use"
    thought, said, called = response["output"]
    assert (thought["content"][0]["text"], said["content"][0]["text"]) == ("Hm, so.", "I look.")
    assert (called["name"], called["arguments"]) == ("get_weather", KOELN)
    # the three special tokens and the words before the end of the analysis
    assert response["usage"]["output_tokens_details"]["reasoning_tokens"] == 2 + len("analysisHm, so.")
    assert (chat["message"]["thinking"], chat["message"]["content"]) == ("Hm, so.", "I look.")
    assert chat["message"]["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": json.loads(KOELN)}
    for written in streams.values():
        assert not re.search(r"<\||analysis|commentary|functions\.|\\ufdd|[\ufdd0-\ufddf]", written)
    done = json.loads(streams["/v1/responses"].rsplit("data: ", 1)[1])["response"]
    assert [each["type"] for each in done["output"]] == ["reasoning", "message", "function_call"]
    assert done["usage"] == response["usage"]
    told = [json.loads(line)["message"] for line in streams["/api/chat"].splitlines()]
    assert "".join(each.get("thinking", "") for each in told) == "Hm, so."
    assert "".join(each["content"] for each in told) == "I look."
    starts = [line[6:] for line in streams["/v1/messages"].splitlines() if '"content_block"' in line]
    blocks = [json.loads(each)["content_block"]["type"] for each in starts]
    assert blocks == ["thinking", "text", "tool_use"]


@pytest.mark.parametrize(("stop", "content"), [("final", "Four "), ("ou", "F"), ("assistant", "Four final")])
async def test_stop_strings_are_of_texts_not_of_headers(stop, content):
    async with harmony_node(f"{THINKS}<|channel|>final<|message|>Four final") as node:
        whole = await ask(node, tools=None, stop=[stop])
        assert (whole.message.content, whole.message.reasoning_content, whole.finish_reason) == (content, "Hm, so.", "stop")
        assert put_together(await stream(node, tools=None, stop=[stop]))[:2] == (content, "Hm, so.")


async def test_a_call_ends_the_reply_although_the_checkpoint_does_not_say_so():
    async with harmony_node(REPLIES["call"][0], end=1) as node:
        assert (await ask(node)).finish_reason == "tool_calls"
        assert put_together(await stream(node))[2:] == REPLIES["call"][2][2:]
        await ask(node, extra_body={"ignore_eos": True})
        assert [each.params.stop_token_ids for each in node.requests.submitted] == [[1], [1], []]
    async with harmony_node(REPLIES["call"][0], end=1, eos_token_ids=(EOS, 1)) as node:
        await ask(node)
        assert node.requests.submitted[0].params.stop_token_ids == []


async def test_log_probabilities_name_the_special_tokens():
    async with harmony_node("<|channel|>final<|message|>4") as node:
        whole = await ask(node, tools=None, logprobs=True, top_logprobs=1)
        tokens = [each.token for each in whole.logprobs.content]
        shown = [WORDS[260 - 257].decode(), *"final", WORDS[259 - 257].decode(), "4"]  # by their names in this vocabulary
        assert tokens == [each.top_logprobs[0].token for each in whole.logprobs.content] == shown
        pieces = await stream(node, tools=None, logprobs=True)
        assert [each.token for choice in pieces if choice.logprobs for each in choice.logprobs.content] == tokens


async def test_what_no_tools_and_the_settings_leave():
    text = f"{THINKS}{CALLS}"
    async with harmony_node(text) as node:
        whole = await ask(node, tool_choice="none")
        assert (whole.message.content, whole.message.tool_calls) == (f"to=functions.get_weather {KOELN}", None)
        assert (whole.message.reasoning_content, whole.finish_reason) == ("Hm, so.", "stop")
    async with harmony_node(text, reasoning_parser="none") as node:
        whole = await ask(node)
        assert (whole.message.content, calls_of(whole.message)) == ("Hm, so.", [("get_weather", KOELN)])
        assert not hasattr(whole.message, "reasoning_content")
    async with harmony_node(text, reasoning_parser="none", tool_parser="none") as node:
        assert "analysis" in (await ask(node, tool_choice="none")).message.content, "it is the text as it stands"


async def test_grammars():
    schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}
    formed: dict[str, Any] = {"response_format": schema}
    fields: list[dict[str, Any]] = [{"tool_choice": "required"}, formed | {"tools": None}, formed]
    answer = f'{THINKS}<|channel|>final <|constrain|>json<|message|>{{"a": 1}}'
    async with harmony_node(answer) as node:
        for each in fields:
            whole = await ask(node, **each)
            assert (whole.message.content, whole.message.reasoning_content) == ('{"a": 1}', "Hm, so.")
        grammars = [each.params.grammar for each in node.requests.submitted]
        assert all("think: <[260]>" in each for each in grammars)
        assert ["final:" in each for each in grammars] == [False, True, True]
        assert ["call:" in each for each in grammars] == [True, False, True]
        with pytest.raises(Exception, match="one reply cannot follow both"):
            await ask(node, tool_choice="required", extra_body={"regex": "a+"})
    async with harmony_node(answer, facts=TextFacts("harmony", "harmony", harmony_marks={1: CHANNEL, 2: MESSAGE})) as node:
        for each in fields:
            with pytest.raises(Exception, match=r"tokenizer of org/tiny has no token <\|start\|>"):
                await ask(node, **each)
        assert not node.requests.submitted


async def test_a_continued_answer():
    messages = [*MESSAGES, {"role": "assistant", "content": "So far"}]
    body = {"continue_final_message": True}
    async with harmony_node(", so good.") as node:
        whole = await ask(node, tools=None, messages=messages, extra_body=body)
        assert (whole.message.content, whole.message.reasoning_content) == (", so good.", None)
        assert put_together(await stream(node, messages=messages, extra_body=body))[0] == ", so good."
        await ask(node, tools=None, messages=messages, extra_body=body | {"regex": "a+"})
        assert node.requests.submitted[-1].params.grammar == "regex:a+", "the prompt ends where the answer goes on"
