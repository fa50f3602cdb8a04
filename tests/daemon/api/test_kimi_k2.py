"""Ids of Kimi K2's calls at the endpoints that show them: they count a conversation's calls, whatever the model numbers them."""

from __future__ import annotations

from typing import Any

import pytest

from daemon.text.tool_parsers.registry import KIMI_K2
from tests.daemon.api import test_messages, test_responses
from tests.daemon.api.fakes import entry, serve, text_script
from tests.daemon.api.test_tools import MESSAGES, ask, put_together, stream
from tests.daemon.text.test_reply_parser import numbered

MODELS = [entry(tool_parser=KIMI_K2, reasoning_parser="think")]
BROKEN = numbered(("functions.search:0", '{"a": 01}'))


def history(*calls: tuple[str, str]) -> list[Any]:
    """A chat with calls in its history. A call: the function's name, and its id."""
    made = [{"id": each, "type": "function", "function": {"name": name, "arguments": "{}"}} for name, each in calls]
    return [*MESSAGES, {"role": "assistant", "tool_calls": made}, {"role": "tool", "tool_call_id": calls[0][1], "content": "42"}]


@pytest.mark.parametrize(
    ("messages", "written", "numbers"),
    [
        (MESSAGES, ("functions.search:0", "functions.search:1"), (0, 1)),
        (MESSAGES, ("search:7", "functions.search"), (0, 1)),
        (history(("search", "functions.search:0")), ("functions.search:0", "functions.search:4"), (1, 4)),
        (history(("f", "call_x"), ("g", "functions.g:5")), ("functions.search:6", "functions.search:6"), (6, 7)),
    ],
)
async def test_a_chat(messages: list[Any], written: tuple[str, str], numbers: tuple[int, int]) -> None:
    ids = [f"functions.search:{number}" for number in numbers]
    first, second = (numbered((each, "{}")) for each in written)
    # a reply whose </think> is missing, with a call at the end that is none
    reply = f"<think>hm {first}{second}{BROKEN}"
    async with serve(lambda _: text_script(reply.encode()), models=MODELS) as node:
        whole = await ask(node, messages=messages, max_tokens=1000)
        choices = await stream(node, messages=messages, max_tokens=1000)
    assert [call.id for call in whole.message.tool_calls] == ids
    assert (whole.message.reasoning_content, whole.message.content, whole.finish_reason) == ("hm", BROKEN, "tool_calls")
    assert put_together(choices)[1] == "hm"
    shown = [call.id for choice in choices for call in choice.delta.tool_calls or () if call.id]
    assert (shown[:2], len(set(shown))) == (ids, 3), "the call that is withdrawn has an id, too"


async def test_a_conversation_of_responses() -> None:
    reply = numbered(("functions.stop:0", "{}"))
    async with serve(lambda _: text_script(reply.encode()), models=MODELS) as node, test_responses.client(node) as opened:
        for streams in (False, True):
            told = await test_responses.ask(opened, streams, tools=test_responses.TOOLS)
            for number in range(3):
                (item,) = told.output
                assert item.call_id == f"functions.stop:{number}"
                output = {"type": "function_call_output", "call_id": item.call_id, "output": "ok"}
                told = await test_responses.ask(
                    opened, streams, input=[output], tools=test_responses.TOOLS, previous_response_id=told.id
                )


async def test_anthropics_messages() -> None:
    reply = numbered(("functions.stop:1", "{}"))
    async with serve(lambda _: text_script(reply.encode()), models=MODELS) as node, test_messages.client(node) as opened:
        whole = await opened.messages.create(**test_messages.GOOD | {"max_tokens": 500}, tools=test_messages.TOOLS)
        async with opened.messages.stream(**test_messages.GOOD | {"max_tokens": 500}, tools=test_messages.TOOLS) as streaming:
            streamed = await streaming.get_final_message()
    assert whole.content[-1].id == streamed.content[-1].id == "functions.stop:1"
