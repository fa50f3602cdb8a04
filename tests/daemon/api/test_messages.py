"""Anthropic's messages through its official client, with replies written by hand; what is refused, and how a body is read."""

from __future__ import annotations

import json
from typing import Any

import aiohttp
import anthropic
import msgspec
import pytest

from daemon.api.bodies import messages_api
from daemon.errors import BadRequest, NotNow
from daemon.models.entry import ServedAdapter
from engine.protocol import FINISH_LENGTH
from tests.daemon.api.fakes import Node, entry, serve, text_script

WEATHER = {
    "name": "get_weather",
    "description": "Weather",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
TOOLS: list[Any] = [WEATHER, {"name": "stop", "input_schema": {"type": "object"}}]
GOOD: dict[str, Any] = {"model": "tiny", "max_tokens": 64, "messages": [{"role": "user", "content": "hi"}]}
KOELN = '{"city":"Köln \U0001f600"}'
CALL = f'<tool_call>\n{{"name": "get_weather", "arguments": {KOELN}}}\n</tool_call>'
# reply -> its blocks as (type, value), stop_reason
REPLIES: dict[str, tuple[str, list[tuple[str, Any]], str]] = {
    "text": ("Hello.", [("text", "Hello.")], "end_turn"),
    "nothing": ("", [], "end_turn"),
    "thinking": ("<think>why\n</think>\n\nBecause.", [("thinking", "why"), ("text", "Because.")], "end_turn"),
    "call": (CALL, [("tool_use", json.loads(KOELN))], "tool_use"),
    "all": (
        f"<think>hm</think>Wait.\n{CALL}{CALL}",
        [("thinking", "hm"), ("text", "Wait."), ("tool_use", json.loads(KOELN)), ("tool_use", json.loads(KOELN))],
        "tool_use",
    ),
    "malformed": ("<tool_call>{oops}</tool_call>", [("text", "<tool_call>{oops}</tool_call>")], "end_turn"),
}


def client(node: Node) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=node.url, api_key="unused", max_retries=0)


def blocks(message: Any) -> list[tuple[str, Any]]:
    values = {"text": "text", "thinking": "thinking", "tool_use": "input"}
    found = [(block.type, getattr(block, values[block.type])) for block in message.content]
    return [each for each in found if each != ("text", "")]  # a stream without text has an empty block


@pytest.mark.parametrize("name", REPLIES)
async def test_the_official_client_reads_replies_streamed_and_not(name: str) -> None:
    reply, wanted, reason = REPLIES[name]
    models = [entry(tool_parser="hermes", reasoning_parser="think")]
    async with serve(lambda _: text_script(reply.encode()), models=models) as node, client(node) as opened:
        whole = await opened.messages.create(**GOOD | {"max_tokens": 500}, tools=TOOLS)
        assert (blocks(whole), whole.stop_reason, whole.role) == (wanted, reason, "assistant")
        assert whole.id.startswith("msg_")
        async with opened.messages.stream(**GOOD | {"max_tokens": 500}, tools=TOOLS) as stream:
            events = [event async for event in stream]
            streamed = await stream.get_final_message()
    assert (blocks(streamed), streamed.stop_reason) == (wanted, reason)
    assert streamed.usage.output_tokens == whole.usage.output_tokens == len(reply.encode()) + 1
    assert streamed.usage.input_tokens == whole.usage.input_tokens == 2
    kinds = [event.type for event in events if event.type.startswith(("message_", "content_block_"))]
    assert (kinds[0], kinds[-2:]) == ("message_start", ["message_delta", "message_stop"])
    starts = [event.index for event in events if event.type == "content_block_start"]
    assert starts == list(range(len(starts)))
    assert kinds.count("content_block_start") == kinds.count("content_block_stop")
    ids = [block.id for block in streamed.content if block.type == "tool_use"]
    assert len(ids) == len(set(ids))


async def test_plain_text_is_streamed_a_token_at_a_time_after_the_reasoning() -> None:
    models = [entry(reasoning_parser="think")]
    async with serve(lambda _: text_script(b"<think>a</think>Hello"), models=models) as node, client(node) as opened:
        async with opened.messages.stream(**GOOD) as stream:
            texts = [event.delta.text async for event in stream if getattr(event, "delta", None) and hasattr(event.delta, "text")]
        assert "".join(texts) == "Hello"
        assert len(texts) == 5


async def test_stop_reasons() -> None:
    async with serve(lambda _: text_script(b"one two three")) as node, client(node) as opened:
        for stream in (False, True):
            told = await _ask(opened, stream, stop_sequences=["xyz", "two", "two t"])
            assert (told.stop_reason, told.stop_sequence, told.content[0].text) == ("stop_sequence", "two", "one ")
    full = [entry(max_model_len=10)]
    async with serve(lambda g: [([97] * g.params.max_tokens, FINISH_LENGTH)], models=full) as node, client(node) as opened:
        for stream in (False, True):
            told = await _ask(opened, stream, max_tokens=5)
            assert (told.stop_reason, told.usage.output_tokens) == ("max_tokens", 5)
            told = await _ask(opened, stream, max_tokens=500)
            assert (told.stop_reason, told.usage.output_tokens) == ("model_context_window_exceeded", 8)
        with pytest.raises(anthropic.BadRequestError, match="prompt is too long: 10 tokens > 9 maximum"):
            await _ask(opened, False, messages=[{"role": "user", "content": "x" * 10}])


async def test_a_call_that_is_cut_short_is_left_out() -> None:
    cut = CALL[: CALL.index("Köln")].encode()
    models = [entry(tool_parser="hermes")]
    async with serve(lambda _: [(list(cut), FINISH_LENGTH)], models=models) as node, client(node) as opened:
        told = await opened.messages.create(**GOOD, tools=TOOLS)
        assert (blocks(told), told.stop_reason) == ([], "max_tokens")


async def _ask(opened: anthropic.AsyncAnthropic, stream: bool, **options: Any) -> Any:
    if not stream:
        return await opened.messages.create(**GOOD | options)
    async with opened.messages.stream(**GOOD | options) as events:
        return await events.get_final_message()


async def test_cached_tokens_are_no_input_tokens() -> None:
    def script(generation: Any) -> Any:
        generation.num_cached = 1
        return text_script(b"x")

    async with serve(script) as node, client(node) as opened:
        for stream in (False, True):
            told = (await _ask(opened, stream)).usage
            assert (told.input_tokens, told.cache_read_input_tokens, told.cache_creation_input_tokens) == (1, 1, 0)


async def test_errors_have_anthropics_form() -> None:
    async with serve() as node, client(node) as opened:
        with pytest.raises(anthropic.NotFoundError) as missing:
            await opened.messages.create(**GOOD | {"model": "nobody"})
        assert missing.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]
        with pytest.raises(anthropic.BadRequestError, match=r"tools\[1\]\.name: 'stop' is there twice"):
            await opened.messages.create(**GOOD, tools=[*TOOLS[1:], TOOLS[1]])
        config: Any = {"format": {"type": "json_schema", "schema": []}}
        with pytest.raises(anthropic.BadRequestError, match=r"message': 'output_config\.format\.schema must be"):
            await opened.messages.create(**GOOD, output_config=config)
        node.requests.refusal = NotNow("queue_full", "full", status=429, retry_after_s=3.0)
        for stream in (False, True):
            with pytest.raises(anthropic.RateLimitError) as full:
                await _ask(opened, stream)
            assert full.value.body == {"type": "error", "error": {"type": "rate_limit_error", "message": "full"}}
            assert full.value.response.headers["retry-after"] == "3"
        async with aiohttp.ClientSession(node.url) as http, http.get("/v1/messages") as answer:
            assert (answer.status, (await answer.json())["type"]) == (405, "error")


async def test_an_error_in_a_stream_is_an_event() -> None:
    script = [([104], 0), NotNow("unloaded", "it was unloaded")]
    async with serve(lambda _: script) as node, client(node) as opened:  # type: ignore[arg-type]
        with pytest.raises(anthropic.APIStatusError, match="it was unloaded"):
            await _ask(opened, True)


async def test_tokens_are_counted() -> None:
    async with serve() as node, client(node) as opened:
        counted = await opened.messages.count_tokens(model="tiny", system="abc", messages=[{"role": "user", "content": "hello"}])
        assert counted.input_tokens == 8
        with pytest.raises(anthropic.BadRequestError, match=r"messages\[0\]\.content\[0\]\.type: 'image'"):
            await opened.messages.count_tokens(model="tiny", messages=[{"role": "user", "content": [{"type": "image"}]}])  # type: ignore[list-item]


async def test_models_are_listed_as_the_official_client_reads_them() -> None:
    adapter = ServedAdapter("org/lora", "/nowhere", "f", (), 1700000001, 8, 0)
    async with serve(models=[entry(), entry("org/base", aliases=(), adapter=adapter)]) as node, client(node) as opened:
        found = [(each.id, each.display_name, each.type, each.created_at.timestamp()) async for each in opened.models.list()]
        assert found == [("org/lora", "org/lora", "model", 1700000001), ("org/tiny", "org/tiny", "model", 1700000000)]
        assert (await opened.models.retrieve("tiny")).id == "org/tiny"
        with pytest.raises(anthropic.NotFoundError) as error:
            await opened.models.retrieve("no/such")
        assert error.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]


async def test_who_may_choose_a_call_of_an_unknown_dialect_is_told_what_would_do() -> None:
    async with serve() as node, client(node) as opened:
        with pytest.raises(anthropic.BadRequestError, match="tool_choice any or tool makes it call"):
            await opened.messages.create(**GOOD, tools=TOOLS)


async def test_one_models_own_path() -> None:
    async with serve() as node, aiohttp.ClientSession(node.url) as http:
        body = {name: value for name, value in GOOD.items() if name != "model"}
        async with http.post("/m/tiny/v1/messages", json=body) as answer:
            assert (answer.status, (await answer.json())["content"]) == (200, [{"type": "text", "text": "ih"}])


# ---- how a body is read


def read(**fields: Any) -> tuple[Any, list[dict[str, Any]]]:
    head, messages = messages_api.parse(json.dumps(GOOD | fields).encode())
    return head, msgspec.msgpack.decode(messages)


def test_a_conversation_with_tools_becomes_a_chat() -> None:
    _, messages = read(
        system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        tools=TOOLS,
        messages=[
            {"role": "user", "content": "hi"},
            {"role": "user", "content": [{"type": "text", "text": "there"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "x"},
                    {"type": "redacted_thinking", "data": "x"},
                    {"type": "text", "text": "Wait."},
                    {"type": "tool_use", "id": "a1", "name": "get_weather", "input": {"city": "Köln"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "a1", "content": [{"type": "text", "text": "rain"}]},
                    {"type": "tool_result", "tool_use_id": "a2", "is_error": True},
                    {"type": "text", "text": "And?"},
                ],
            },
        ],
    )
    call = {"id": "a1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city":"Köln"}'}}
    assert messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hi\nthere"},
        {"role": "assistant", "content": "Wait.", "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "content": "rain", "tool_call_id": "a1"},
        {"role": "tool", "content": "", "tool_call_id": "a2"},
        {"role": "user", "content": "And?"},
    ]


def test_instructions_may_come_later() -> None:
    """Claude Code sends some behind the first message of the user."""
    brief: list[Any] = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    for content in ("Be brief.", brief):
        _, messages = read(system="Be kind.", messages=[*GOOD["messages"], {"role": "system", "content": content}])
        assert [(each["role"], each["content"]) for each in messages] == [
            ("system", "Be kind."),
            ("user", "hi"),
            ("system", "Be brief."),
        ]


def test_a_context_that_is_left_as_it_is_is_not_managed() -> None:
    for edits in ([], [{"type": "clear_thinking_20251015", "keep": "all"}]):  # the second is Claude Code's
        read(context_management={"edits": edits})
    for edit in (
        {"type": "clear_tool_uses_20250919"},
        {"type": "clear_thinking_20251015"},
        {"type": "clear_thinking_20251015", "keep": {"type": "thinking_turns", "value": 1}},
    ):
        with pytest.raises(BadRequest, match="context_management is not supported"):
            read(context_management={"edits": [edit]})


def test_the_fields_become_a_chats() -> None:
    schema = {"type": "object"}
    head, _ = read(
        temperature=0.5,
        top_k=3,
        stop_sequences=["x"],
        stream=True,
        tools=TOOLS,
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
        thinking={"type": "enabled", "budget_tokens": 1024},
        output_config={"effort": "max"},
    )
    assert (head.max_tokens, head.temperature, head.top_k, head.stop, head.stream) == (64, 0.5, 3, ["x"], True)
    assert (head.tools.choice, head.tools.many, head.tools.names) == ("required", False, ["get_weather", "stop"])
    assert msgspec.msgpack.decode(head.options["kwargs"]) == {"reasoning_effort": "xhigh", "enable_thinking": True}
    assert read(tools=TOOLS, tool_choice={"type": "tool", "name": "stop"})[0].tools.name == "stop"
    assert read(tools=TOOLS, tool_choice={"type": "none"})[0].tools is None
    wanted = {"type": "json_schema", "schema": schema}
    for given in ({"output_config": {"format": wanted}}, {"output_format": wanted}):
        assert read(**given)[0].grammar == 'json_schema:{"type": "object"}'
    assert (
        read(messages=[*GOOD["messages"], {"role": "assistant", "content": "So"}])[0].options["continue_final_message"] == "answer"
    )


def test_an_empty_last_message_of_the_assistant_is_none() -> None:
    for content in ("", []):
        head, messages = read(messages=[*GOOD["messages"], {"role": "assistant", "content": content}])
        assert (head.options.get("continue_final_message"), len(messages)) == (read()[0].options.get("continue_final_message"), 1)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "system", "content": [{"type": "image"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "a\0"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "messages[0].content[0].tool_use_id"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "x"}]}]}, "messages[0].content[0].name"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "x", "name": "y"}]}]}, "messages"),
        ({"messages": [{"role": "assistant", "content": [{"type": "thinking", "thinking": "x"}]}]}, "messages"),
        ({"messages": [{"role": "assistant", "content": ""}]}, "messages"),
        ({"system": [{"type": "image"}]}, "system[0].type"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"name": "a b"}]}, "tools[0].function.name"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "tool", "name": "stop"}}, "tool_choice"),
        ({"tools": [], "tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "no"}}, "tool_choice.function.name"),
        ({"thinking": {"type": "later"}}, "thinking.type"),
        ({"temperature": 1.5}, "temperature"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"mcp_servers": [{"type": "url"}]}, "mcp_servers"),
        ({"container": "x"}, "container"),
    ],
)
def test_bad_fields_are_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as error:
        read(**fields)
    assert error.value.param == param
