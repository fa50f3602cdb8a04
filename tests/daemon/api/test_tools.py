"""Tools and reasoning through the official client, with replies written by hand."""

from __future__ import annotations

import json
from typing import Any

import aiohttp
import msgspec
import openai
import pytest

from daemon.api.bodies import chat
from daemon.text.jobs import TextFacts
from engine.protocol import FINISH_LENGTH, FINISH_NONE, FINISH_STOP
from tests.daemon.api.fakes import EOS, entry, serve, text_script
from tests.daemon.api.sse_events import events

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "get_weather", "description": "Weather", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "search"}},
]
MESSAGES: list[Any] = [{"role": "user", "content": "hi"}]
KOELN = '{"city": "Köln \U0001f600 \\"x\\""}'
CALL = f'<tool_call>\n{{"name": "get_weather", "arguments": {KOELN}}}\n</tool_call>'
SEARCH = '<tool_call>{"name": "search", "arguments": {}}</tool_call>'
# tool_parser, reply, (content, calls, finish_reason)
REPLIES = {
    "text": ("hermes", "Hello.", ("Hello.", [], "stop")),
    "one": ("hermes", CALL, (None, [("get_weather", KOELN)], "tool_calls")),
    "text and two": ("hermes", f"Wait.\n{CALL}\n{SEARCH}", ("Wait.", [("get_weather", KOELN), ("search", "{}")], "tool_calls")),
    "malformed": ("hermes", "<tool_call>{oops}</tool_call>", ("<tool_call>{oops}</tool_call>", [], "stop")),
    "llama3": ("llama3", f'{{"name": "get_weather", "parameters": {KOELN}}}', (None, [("get_weather", KOELN)], "tool_calls")),
    "mistral": ("mistral", f"[TOOL_CALLS]get_weather[ARGS]{KOELN}", (None, [("get_weather", KOELN)], "tool_calls")),
    "mistral list": (
        "mistral",
        f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {KOELN}}}]',
        (None, [("get_weather", KOELN)], "tool_calls"),
    ),
}


def client(node: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=node.url + "/v1", api_key="unused", max_retries=0)


async def ask(node: Any, **options: Any) -> Any:
    async with client(node) as opened:
        return (
            await opened.chat.completions.create(**({"model": "tiny", "messages": MESSAGES, "tools": TOOLS} | options))
        ).choices[0]


async def stream(node: Any, **options: Any) -> list[Any]:
    """The choices of all chunks."""
    async with client(node) as opened:
        options = {"model": "tiny", "messages": MESSAGES, "tools": TOOLS, "stream": True} | options
        chunks = [chunk async for chunk in await opened.chat.completions.create(**options)]
    return [chunk.choices[0] for chunk in chunks if chunk.choices]


def put_together(choices: list[Any]) -> tuple[str | None, str, list[tuple[str, str]], str]:
    """(content, reasoning, calls, finish_reason) of a stream; checks the shape of each delta of a call."""
    calls: list[tuple[str, list[str]]] = []
    ids = set()
    for choice in choices:
        for call in choice.delta.tool_calls or ():
            if call.index == len(calls):
                assert (call.type, call.function.arguments) == ("function", "")
                assert call.id
                ids.add(call.id)
                calls.append((call.function.name, []))
            else:
                assert call.index == len(calls) - 1
                assert (call.id, call.type, call.function.name) == (None, None, None)
                assert call.function.arguments
                calls[call.index][1].append(call.function.arguments)
        assert (choice.finish_reason is not None) == (choice is choices[-1])
    assert len(ids) == len(calls)
    assert choices[0].delta.role == "assistant"
    content = "".join(choice.delta.content or "" for choice in choices)
    reasoning = "".join(getattr(choice.delta, "reasoning_content", None) or "" for choice in choices)
    return content or None, reasoning, [(name, "".join(parts)) for name, parts in calls], choices[-1].finish_reason


def calls_of(message: Any) -> list[tuple[str, str]]:
    for call in message.tool_calls or ():
        assert call.type == "function"
        assert call.id
    return [(call.function.name, call.function.arguments) for call in message.tool_calls or ()]


@pytest.mark.parametrize("name", REPLIES)
async def test_the_official_client_reads_replies_streamed_and_not(name):
    dialect, reply, (content, calls, reason) = REPLIES[name]
    async with serve(lambda _: text_script(reply.encode()), models=[entry(tool_parser=dialect)]) as node:
        whole = await ask(node)
        assert (whole.message.content, calls_of(whole.message), whole.finish_reason) == (content, calls, reason)
        choices = await stream(node)
        assert put_together(choices) == (content, "", calls, reason)
    if calls == [("get_weather", KOELN)]:
        fragments = [c.delta.tool_calls[0].function.arguments for c in choices if c.delta.tool_calls][1:]
        assert len(fragments) > len(KOELN) // 2, "arguments come as they are generated"


async def test_special_tokens_are_markers():
    """A tokenizer that calls [TOOL_CALLS] special leaves it out of texts."""
    arguments = '{"city": "x"}'
    script = [([258], FINISH_NONE), *(([value], FINISH_NONE) for value in b"search"), ([259], FINISH_NONE)]
    script += [(list(arguments.encode()), FINISH_NONE), ([EOS], FINISH_STOP)]
    async with serve(lambda _: script) as node:
        node.text.known_facts = TextFacts(tool_parser="mistral", markers={258: "[TOOL_CALLS]", 259: "[ARGS]"})
        whole = await ask(node)
        assert calls_of(whole.message) == [("search", arguments)]
        assert len(whole.message.tool_calls[0].id) == 9
        assert put_together(await stream(node))[2] == [("search", arguments)]


async def test_the_config_goes_before_the_template():
    async with serve(lambda _: text_script(CALL.encode()), models=[entry(tool_parser="none")]) as node:
        node.text.known_facts = TextFacts(tool_parser="hermes")
        with pytest.raises(openai.BadRequestError, match="tool_parser") as error:
            await ask(node)
        assert (error.value.param, error.value.code) == ("tools", "unsupported_parameter")


GENERIC = f'{{"name":"get_weather","arguments":{KOELN}}}'
GENERIC_SEARCH = '{"name":"search","arguments":{}}'
WEATHER = {"type": "function", "function": {"name": "get_weather"}}


def looking(node: Any) -> list[dict[str, Any]]:
    """The options of the chats rendered from now on."""
    shown: list[dict[str, Any]] = []
    encode = node.text.encode_chat

    async def look(model: Any, messages: bytes, options: dict[str, Any], *more: int) -> Any:
        shown.append(options)
        return await encode(model, messages, options, *more)

    node.text.encode_chat = look
    return shown


@pytest.mark.parametrize("configured", [None, "none"])
@pytest.mark.parametrize(
    ("options", "forced"),
    [
        ({"tool_choice": "required"}, {"name": "", "many": True}),
        ({"tool_choice": "required", "parallel_tool_calls": False}, {"name": "", "many": False}),
        ({"tool_choice": WEATHER}, {"name": "get_weather", "many": False}),
    ],
)
async def test_forced_calls_need_no_dialect(options, forced, configured):
    reply = f"{GENERIC}\n{GENERIC_SEARCH}" if forced["many"] else GENERIC
    expected = [("get_weather", KOELN), ("search", "{}")] if forced["many"] else [("get_weather", KOELN)]
    async with serve(lambda _: text_script(reply.encode()), models=[entry(tool_parser=configured)]) as node:
        shown = looking(node)
        whole = await ask(node, **options)
        assert (whole.message.content, calls_of(whole.message), whole.finish_reason) == (None, expected, "tool_calls")
        choices = await stream(node, **options)
        assert put_together(choices) == (None, "", expected, "tool_calls")
        grammar = node.requests.submitted[0].params.grammar
        assert ("search" in grammar) == (forced["name"] == "")
        assert [(each["plain_calls"], each["forced"]) for each in shown] == [(True, forced)] * 2
    fragments = [c.delta.tool_calls[0].function.arguments for c in choices if c.delta.tool_calls][1:]
    assert len(fragments) > len(KOELN) // 2, "arguments come as they are generated"


async def test_a_forced_call_without_a_dialect_cut_off_by_max_tokens():
    async with serve(lambda _: text_script(GENERIC[:45].encode(), FINISH_LENGTH)) as node:
        whole = await ask(node, tool_choice="required")
        ((name, arguments),) = calls_of(whole.message)
        assert (name, whole.finish_reason) == ("get_weather", "length")
        assert KOELN.startswith(arguments)
        assert put_together(await stream(node, tool_choice="required")) == (None, "", [(name, arguments)], "length")


async def test_who_may_choose_needs_a_dialect_and_is_told_what_would_do():
    async with serve() as node:
        for options in ({}, {"tool_choice": "auto"}, FORCED["strict"]):
            with pytest.raises(openai.BadRequestError, match='tool_choice "required" or a function\'s name') as error:
                await ask(node, **options)
            assert (error.value.param, error.value.code) == ("tools", "unsupported_parameter")
        assert not node.requests.submitted


async def test_which_chats_may_have_calls_written_as_text():
    """Those of models without a dialect, where a call is forced or the history holds one."""
    function = {"name": "search", "arguments": "{}"}
    called = {"role": "assistant", "tool_calls": [{"id": "c", "type": "function", "function": function}]}
    result = {"role": "tool", "tool_call_id": "c", "content": "42"}
    async with serve(lambda _: text_script(b"ok")) as node:
        shown = looking(node)
        for dialect, expected in (("none", [False, True, True, True, True]), ("hermes", [False] * 5)):
            node.text.known_facts = TextFacts(dialect)
            await ask(node, tool_choice="none")
            await ask(node, tool_choice="required")
            await ask(node, tool_choice="none", messages=[*MESSAGES, called])
            await ask(node, tools=openai.NOT_GIVEN, messages=[*MESSAGES, result])
            async with aiohttp.ClientSession() as session:
                body = {"model": "tiny", "messages": MESSAGES, "tools": TOOLS, "tool_choice": "required"}
                async with session.post(f"{node.url}/tokenize", json=body) as answer:
                    assert answer.status == 200
            assert [bool(options.get("plain_calls")) for options in shown] == expected
            shown.clear()


async def test_parallel_tool_calls_false_keeps_the_first():
    reply = f"{CALL}\n{SEARCH}"
    async with serve(lambda _: text_script(reply.encode()), models=[entry(tool_parser="hermes")]) as node:
        whole = await ask(node, parallel_tool_calls=False)
        assert calls_of(whole.message) == [("get_weather", KOELN)]
        assert put_together(await stream(node, parallel_tool_calls=False))[2:] == ([("get_weather", KOELN)], "tool_calls")


@pytest.mark.parametrize("choice", ["none", None])
async def test_what_the_template_is_shown(choice):
    shown = []
    async with serve(lambda _: text_script(CALL.encode()), models=[entry(tool_parser="hermes")]) as node:
        encode = node.text.encode_chat

        async def look(model: Any, messages: bytes, options: dict[str, Any], *more: int) -> Any:
            shown.append(options)
            return await encode(model, messages, options, *more)

        node.text.encode_chat = look
        whole = await ask(node, extra_body={"documents": [{"text": "d"}]} | ({"tool_choice": choice} if choice else {}))
    if choice == "none":
        assert shown[0]["tools"] == b""
        assert (whole.message.content, whole.message.tool_calls) == (CALL, None)
    else:
        assert json.loads(shown[0]["tools"]) == TOOLS
    assert json.loads(shown[0]["documents"]) == [{"text": "d"}]


def test_allowed_tools_are_the_only_ones():
    named = {"type": "function", "function": {"name": TOOLS[1]["function"]["name"]}}
    for mode in ("auto", "required"):
        choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [named]}}
        body = {"model": "tiny", "messages": MESSAGES, "tools": TOOLS, "tool_choice": choice}
        head, _ = chat.parse(json.dumps(body).encode())
        assert head.tools is not None
        assert (head.tools.choice, head.tools.names) == (mode, [TOOLS[1]["function"]["name"]])
        assert json.loads(head.options["tools"]) == TOOLS[1:2]


async def test_tool_choice_none_needs_no_dialect_and_its_stream_is_the_plain_one():
    async with serve(lambda _: text_script(CALL.encode())) as node:
        assert put_together(await stream(node, tool_choice="none")) == (CALL, "", [], "stop")
        assert type(node.requests.submitted[0].sink).__name__ == "Stream"


async def test_a_call_cut_off_by_max_tokens():
    cut = CALL[:50].encode()
    async with serve(lambda _: text_script(cut, FINISH_LENGTH), models=[entry(tool_parser="hermes")]) as node:
        whole = await ask(node)
        assert whole.finish_reason == "length"
        ((name, arguments),) = calls_of(whole.message)
        assert name == "get_weather"
        assert KOELN.startswith(arguments)
        assert put_together(await stream(node)) == (None, "", [(name, arguments)], "length")


async def test_a_stop_string_ends_a_call_in_the_middle():
    async with serve(lambda _: text_script(CALL.encode()), models=[entry(tool_parser="hermes")]) as node:
        whole = await ask(node, stop="</tool_call>")
        assert (calls_of(whole.message), whole.finish_reason) == ([("get_weather", KOELN)], "tool_calls")
        whole = await ask(node, stop="Köln")
        assert (whole.message.content, whole.finish_reason) == (CALL.partition("Köln")[0], "stop")
        assert put_together(await stream(node, stop="Köln"))[3] == "stop"


REASONED = "<think>\nLet me <think>.\n</think>\n\nYes."


@pytest.mark.parametrize(
    ("prompt", "reply", "reasoning", "content"),
    [
        ("hi", REASONED, "Let me <think>.", "Yes."),
        ("hi<think>\n", REASONED.removeprefix("<think>"), "Let me <think>.", "Yes."),
        ("hi", "Yes.", None, "Yes."),
        ("hi<think>", "never done", "never done", None),
    ],
)
@pytest.mark.parametrize("place", ["template", "config"])
async def test_reasoning_is_split_off(prompt, reply, reasoning, content, place):
    models = [entry(reasoning_parser="think")] if place == "config" else None
    messages = [{"role": "user", "content": prompt}]
    async with serve(lambda _: text_script(reply.encode()), models=models) as node:
        node.text.known_facts = TextFacts(reasoning_parser="think" if place == "template" else "none")
        whole = await ask(node, tools=openai.NOT_GIVEN, messages=messages)
        assert (whole.message.content, whole.message.reasoning_content) == (content, reasoning)
        choices = await stream(node, tools=openai.NOT_GIVEN, messages=messages)
        assert put_together(choices) == (content, reasoning or "", [], "stop")
        node.models[0].reasoning_parser = "none"
        plain = await ask(node, tools=openai.NOT_GIVEN, messages=messages)
        assert plain.message.content == reply


async def test_reasoning_then_a_call():
    async with serve(lambda _: text_script(f"<think>hm</think>\n{CALL}".encode())) as node:
        node.text.known_facts = TextFacts("hermes", "think")
        whole = await ask(node)
        assert (whole.message.content, whole.message.reasoning_content) == (None, "hm")
        assert put_together(await stream(node)) == (None, "hm", [("get_weather", KOELN)], "tool_calls")


@pytest.mark.parametrize("options", [{"include_usage": True}, {"include_usage": True, "continuous_usage_stats": True}])
async def test_usage_and_frames(options):
    async with serve(lambda _: text_script(CALL.encode()), models=[entry(tool_parser="hermes")]) as node:
        body = {"model": "tiny", "messages": MESSAGES, "tools": TOOLS, "stream": True, "stream_options": options}
        async with aiohttp.ClientSession() as session, session.post(f"{node.url}/v1/chat/completions", json=body) as answer:
            data, _, done = events(await answer.text())
    assert done
    assert data[-1]["usage"]["completion_tokens"] == len(CALL.encode()) + 1
    usages = [chunk["usage"] and chunk["usage"]["completion_tokens"] for chunk in data[:-1]]
    assert usages == sorted(usages) if "continuous_usage_stats" in options else set(usages) == {None}
    assert all(chunk["choices"][0]["logprobs"] is None for chunk in data[:-1])


async def test_a_slow_client_loses_nothing():
    arguments = json.dumps({"city": "x" * 300_000}).encode()
    reply = b'<tool_call>{"name": "search", "arguments": ' + arguments + b"}</tool_call>"
    script = [(list(reply[at : at + 100]), FINISH_NONE) for at in range(0, len(reply), 100)]
    async with serve(lambda _: [*script, ([EOS], FINISH_STOP)], models=[entry(tool_parser="hermes")]) as node:
        _, _, calls, reason = put_together(await stream(node))
    assert calls == [("search", arguments.decode())]
    assert reason == "tool_calls"


async def test_a_large_body_with_tools_is_read_in_the_helper():
    async with serve(lambda _: text_script(CALL.encode()), models=[entry(tool_parser="hermes", max_model_len=1 << 20)]) as node:
        whole = await ask(node, messages=[{"role": "user", "content": "x" * 200_000}])
        assert node.text.num_parsed == 1
        assert calls_of(whole.message) == [("get_weather", KOELN)]


async def test_calls_go_back_to_the_template():
    shown = []
    async with serve(lambda _: text_script(b"ok"), models=[entry(tool_parser="hermes")]) as node:
        encode = node.text.encode_chat

        async def look(model: Any, messages: bytes, options: dict[str, Any], *more: int) -> Any:
            shown.extend(msgspec.msgpack.decode(messages))
            return await encode(model, messages, options, *more)

        node.text.encode_chat = look
        function = {"name": "search", "arguments": '{"q": 1}'}
        call = {"id": "call_1", "type": "function", "function": function}
        replies = [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "call_1", "content": "42"}]
        await ask(node, messages=[*MESSAGES, *replies])
    assert shown[1]["tool_calls"] == [call]
    assert shown[2] == {"role": "tool", "content": "42", "tool_call_id": "call_1"}


FORCED = {
    "required": {"tool_choice": "required"},
    "named": {"tool_choice": {"type": "function", "function": {"name": "get_weather"}}},
    "strict": {"tools": [{"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS, "strict": True}}]},
}


@pytest.mark.parametrize("name", FORCED)
async def test_forced_and_strict_tools_follow_a_grammar(name):
    async with serve(lambda _: text_script(CALL.encode()), models=[entry(tool_parser="hermes", reasoning_parser="think")]) as node:
        whole = await ask(node, **FORCED[name])
        assert (calls_of(whole.message), whole.finish_reason) == ([("get_weather", KOELN)], "tool_calls")
        grammar = node.requests.submitted[0].params.grammar
        assert grammar.startswith("lark:")
        assert '"city"' in grammar
        assert ("tool_1" in grammar) == (name == "required")
        assert hasattr(whole.message, "reasoning_content") == (name == "strict"), "a forced reply has no room for reasoning"
        assert put_together(await stream(node, **FORCED[name]))[2] == [("get_weather", KOELN)]
        await ask(node)
        assert not node.requests.submitted[-1].params.grammar


SCHEMA_FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}


async def test_tools_beside_a_response_format():
    for reply, content, calls in ((CALL, None, [("get_weather", KOELN)]), ('{"a": 1}', '{"a": 1}', [])):
        async with serve(lambda _, reply=reply: text_script(reply.encode()), models=[entry(tool_parser="hermes")]) as node:
            whole = await ask(node, response_format=SCHEMA_FORMAT)
            assert (whole.message.content, calls_of(whole.message)) == (content, calls)
            assert "answer: %json" in node.requests.submitted[0].params.grammar


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}], ids=["any", "named"])
@pytest.mark.parametrize("asked", [SCHEMA_FORMAT, {"type": "json_object"}], ids=["schema", "object"])
async def test_a_forced_call_leaves_no_text_for_a_response_format(choice, asked):
    """Instructor sends both for its mode RESPONSES_TOOLS."""
    async with serve(lambda _: text_script(CALL.encode()), models=[entry(tool_parser="hermes")]) as node:
        whole = await ask(node, tool_choice=choice, response_format=asked)
        assert calls_of(whole.message) == [("get_weather", KOELN)]
        await ask(node, tool_choice=choice)
        with_format, without = (each.params.grammar for each in node.requests.submitted)
        assert with_format == without != ""


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"tool_choice": "required", "extra_body": {"regex": "a+"}}, "tools"),
        ({"extra_body": {"regex": "a+"}}, "tools"),
        (
            {
                "tool_choice": "required",
                "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}],
            },
            "tools[0].function.parameters.type",
        ),
        (
            {
                "tool_choice": "required",
                "tools": [{"type": "function", "function": {"name": "f", "parameters": {"pattern": "x" * 70_000}}}],
            },
            "tools",
        ),
    ],
)
async def test_what_no_grammar_can_be_made_of(options, param):
    async with serve(models=[entry(tool_parser="hermes")]) as node:
        with pytest.raises(openai.BadRequestError) as error:
            await ask(node, **options)
        assert error.value.param == param
        assert not node.requests.submitted


async def test_behind_the_reasoning_a_stream_is_a_plain_one():
    """An answer costs no more than one without reasoning."""
    answer = "Yes, « 😀 ».\n" * 50
    sinks = []
    script = [*((list(each.encode()), FINISH_NONE) for each in ("<think>hm", "</think>\n\n")), 0.1]
    script += [([value], FINISH_NONE) for value in answer.encode()]
    async with serve(lambda _: [*script, ([EOS], FINISH_STOP)], models=[entry(reasoning_parser="think")]) as node:
        for options in ({}, {"logprobs": True}, {"stop": "never there"}, {"stream_options": {"include_usage": True}}):
            choices = await stream(node, tools=openai.NOT_GIVEN, **options)
            assert put_together(choices) == (answer, "hm", [], "stop")
            sinks.append(node.requests.submitted[-1].sink)
    assert all(type(sink._heir).__name__ == "Stream" for sink in sinks)
    assert all(sink._heir.num_tokens == len(f"<think>hm</think>\n\n{answer}".encode()) + 1 for sink in sinks)


async def test_every_token_has_its_log_probability():
    async with serve(lambda _: text_script(CALL.encode()), models=[entry(tool_parser="hermes")]) as node:
        choices = await stream(node, logprobs=True)
        tokens = b"".join(
            bytes(each.bytes or ()) for choice in choices if choice.logprobs for each in choice.logprobs.content or ()
        )
        assert tokens.startswith(CALL.encode())
        whole = await ask(node, logprobs=True)
        assert len(whole.logprobs.content) == sum(len(c.logprobs.content) for c in choices if c.logprobs)


async def test_several_choices():
    replies = [CALL, "Hello."]
    async with serve(
        lambda generation: text_script(replies[generation.request_id % 2].encode()), models=[entry(tool_parser="hermes")]
    ) as node:
        async with client(node) as opened:
            options: Any = {"model": "tiny", "messages": MESSAGES, "tools": TOOLS, "n": 2}
            whole = await opened.chat.completions.create(**options)
            assert [choice.finish_reason for choice in whole.choices] == ["stop", "tool_calls"]
            chunks = [chunk async for chunk in await opened.chat.completions.create(**options, stream=True)]
        for index, expected in enumerate([("Hello.", [], "stop"), (None, [("get_weather", KOELN)], "tool_calls")]):
            content, _, calls, reason = put_together([c.choices[0] for c in chunks if c.choices[0].index == index])
            assert (content, calls, reason) == expected
