"""Malformed bodies: always 4xx in OpenAI's shape naming the field, never 5xx, and the next request is served."""

from __future__ import annotations

import json
import string
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Struct

from daemon.api.bodies import chat, completions, embeddings, messages_api, ollama_chat, rerank, responses_api, score
from daemon.api.bodies.unsupported import neutral_values
from daemon.errors import BadRequest
from tests.daemon.api.fakes import serve
from tests.daemon.api.openai_error import check_error

GOOD_CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
GOOD_TEXT = {"model": "tiny", "prompt": "hi"}
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
Parse = Callable[[bytes], tuple[Any, bytes]]

# (path, body as JSON or bytes, param named)
# ruff: noqa: E501
TOOL = {"type": "function", "function": {"name": "f"}}
FIELDS: list[tuple[str, dict[str, object], str]] = [
    *[(path, {"temperature": value}, "temperature") for path in (CHAT, TEXT) for value in (-0.1, 2.1, "1", [], {}, True)],
    *[(path, {"top_p": value}, "top_p") for path in (CHAT, TEXT) for value in (-0.1, -1, 1.01, "x", [1])],
    *[(path, {"top_k": value}, "top_k") for path in (CHAT, TEXT) for value in (-2, 1.5, "1", 2**31)],
    *[(path, {"seed": value}, "seed") for path in (CHAT, TEXT) for value in (2**63, -(2**63) - 1, 1.5, "1", 10**30)],
    (TEXT, {"max_tokens": 0, "echo": False}, "max_tokens"),
    *[(path, {"max_tokens": value}, "max_tokens") for path in (CHAT, TEXT) for value in (0, -1, 1.5, "1", 2**31, [], True)],
    *[(path, {"max_completion_tokens": value}, "max_completion_tokens") for path in (CHAT, TEXT) for value in (0, -1, "1")],
    *[(path, {"min_tokens": value}, "min_tokens") for path in (CHAT, TEXT) for value in (-1, "1", 1.5)],
    *[(path, {"min_tokens": 5, "max_tokens": 4}, "min_tokens") for path in (CHAT, TEXT)],
    *[(path, {"ignore_eos": value}, "ignore_eos") for path in (CHAT, TEXT) for value in (1, "true", [])],
    *[(path, {"stop": value}, "stop") for path in (CHAT, TEXT) for value in (1, "", [""], ["a"] * 17, {"a": 1}, "x" * 1025)],
    *[(path, {"stop": ["a", 1]}, "stop[1]") for path in (CHAT, TEXT)],
    *[(path, {"stop_token_ids": value}, param) for path in (CHAT, TEXT) for value, param in (
        ("1", "stop_token_ids"), ([-1], "stop_token_ids[0]"), ([1, "a"], "stop_token_ids[1]"), ([99999], "stop_token_ids"),
    )],
    *[(path, {"stream": value}, "stream") for path in (CHAT, TEXT) for value in (1, "true", [], {})],
    *[(path, {"stream_options": value}, "stream_options") for path in (CHAT, TEXT) for value in (1, [], {"include_usage": True})],
    *[(path, {"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage") for path in (CHAT, TEXT)],
    *[(path, {"model": value}, "model") for path in (CHAT, TEXT) for value in (1, [], "", None, "no/such", "a\0b", "\x01")],
    *[(path, {name: value}, name) for path in (CHAT, TEXT) for name in ("n", "best_of") for value in (-1, 129, "1", 1.5, True, [])],
    *[(path, {"n": 0}, "n") for path in (CHAT, TEXT)],
    (TEXT, {"n": 128, "prompt": ["a"] * 9}, "n"),
    *[(path, {name: value}, name) for path in (CHAT, TEXT) for name in ("presence_penalty", "frequency_penalty")
      for value in (-2.1, 2.1, "1", True, [])],
    *[(path, {"repetition_penalty": value}, "repetition_penalty") for path in (CHAT, TEXT) for value in (0, -1, 101, "1")],
    *[(path, {"min_p": value}, "min_p") for path in (CHAT, TEXT) for value in (-0.1, 1.1, "0", True)],
    *[(path, {"logit_bias": value}, param) for path in (CHAT, TEXT) for value, param in (
        ([], "logit_bias"), ({"a": 1}, "logit_bias"), ({"-1": 1}, "logit_bias"), ({"1.5": 1}, "logit_bias"), ({"": 1}, "logit_bias"),
        ({"99999": 1}, "logit_bias"), ({"1": 101}, 'logit_bias["1"]'), ({"7": 1, "1": -100.5}, 'logit_bias["1"]'),
        ({"1": "a"}, 'logit_bias["1"]'), ({"²": 1}, "logit_bias"), ({str(i): 0 for i in range(1025)}, "logit_bias"),
    )],
    *[(CHAT, {"logprobs": value}, "logprobs") for value in (5, 0, "true", [])],
    *[(CHAT, {"logprobs": True, "top_logprobs": value}, "top_logprobs") for value in (21, -1, "1", 1.5, True)],
    *[(CHAT, {"top_logprobs": 3, **more}, "top_logprobs") for more in ({}, {"logprobs": False})],
    *[(TEXT, {"logprobs": value}, "logprobs") for value in (21, -1, "1", 1.5, True, [])],
    *[(TEXT, {"echo": value}, "echo") for value in (1, "true", [])],
    *[(path, {"user": 1}, "user") for path in (CHAT, TEXT)],
    *[(path, {"priority": value}, "priority") for path in (CHAT, TEXT) for value in ("high", 2**40, 0.5)],
    *[(CHAT, {"messages": value}, "messages") for value in ([], None, "hi", 1, {"role": "user"})],
    *[(CHAT, {"messages": [value]}, "messages[0]") for value in ("hi", 1, None, [])],
    *[(CHAT, {"messages": [{"content": "x"}]}, "messages[0].role")],
    *[(CHAT, {"messages": [{"role": value, "content": "x"}]}, "messages[0].role") for value in ("robot", "", 1, None)],
    *[(CHAT, {"messages": [{"role": "user", "content": value}]}, "messages[0].content") for value in (1, {}, None, True, "a\0b")],
    *[(CHAT, {"messages": [{"role": "user", "content": [value]}]}, param) for value, param in (
        ("x", "messages[0].content[0]"),
        ({}, "messages[0].content[0].type"),
        ({"type": "text"}, "messages[0].content[0].text"),
        ({"type": "text", "text": 1}, "messages[0].content[0].text"),
        ({"type": "image_url", "image_url": {"url": "x"}}, "messages[0].content[0].type"),
    )],
    (CHAT, {"messages": [{"role": "user", "content": "x", "name": 1}]}, "messages[0].name"),
    (CHAT, {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": "x"}]}, "messages[1].tool_calls"),
    (CHAT, {"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]}, "messages[0].tool_calls[0].function.name"),
    (CHAT, {"tools": "x"}, "tools"),
    (CHAT, {"tools": [1]}, "tools[0]"),
    (CHAT, {"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0].type"),
    (CHAT, {"tools": [{"type": "function"}]}, "tools[0].function"),
    (CHAT, {"tools": [TOOL, {"type": "function", "function": {}}]}, "tools[1].function.name"),
    (CHAT, {"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    (CHAT, {"tools": [{"type": "function", "function": {"name": "f\n"}}]}, "tools[0].function.name"),
    (CHAT, {"tools": [TOOL, TOOL]}, "tools[1].function.name"),
    (CHAT, {"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]}, "tools[0].function.parameters"),
    (CHAT, {"tools": [{"type": "function", "function": {"name": "f", "strict": 1}}]}, "tools[0].function.strict"),
    (CHAT, {"tools": [TOOL], "tool_choice": "always"}, "tool_choice"),
    (CHAT, {"tools": [TOOL], "tool_choice": 1}, "tool_choice"),
    (CHAT, {"tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice.function"),
    (CHAT, {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice.function.name"),
    (CHAT, {"tools": [TOOL], "tool_choice": {"type": "auto"}}, "tool_choice.type"),
    (CHAT, {"tools": [TOOL], "tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools"),
    (CHAT, {"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": []}}}, "tool_choice"),
    (CHAT, {"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [
        {"type": "function", "function": {"name": "g"}}]}}}, "tool_choice.allowed_tools.tools[0].function.name"),
    (CHAT, {"tool_choice": "required"}, "tool_choice"),
    (CHAT, {"tools": [TOOL]}, "tools"),
    (CHAT, {"parallel_tool_calls": 1}, "parallel_tool_calls"),
    (CHAT, {"documents": ["x"]}, "documents[0]"),
    (TEXT, {"tools": [TOOL]}, "tools"),
    (TEXT, {"tool_choice": "auto"}, "tool_choice"),
    (CHAT, {"messages": [{"role": "user", "content": "x" * 5000}]}, "messages"),
    (CHAT, {"max_tokens": 5000}, "messages"),
    (CHAT, {"chat_template_kwargs": []}, "chat_template_kwargs"),
    (CHAT, {"messages": [{"role": "user", "content": ""}]}, "messages"),
    *[(TEXT, {"prompt": value}, "prompt") for value in (None, 1, {}, [], True, "", "a\0b", [None], [{}], [True], "x" * 5000)],
    *[(TEXT, {"prompt": value}, param) for value, param in (
        ([1, -1], "prompt[1]"), ([1, "a"], "prompt[1]"), (["a", 1], "prompt[1]"), ([[1], []], "prompt[1]"), ([1.5], "prompt[0]"),
        ([[1, "a"]], "prompt[0][1]"), ([99999], "prompt"), ([[1], [99999]], "prompt[1]"), (["a", "b\0"], "prompt[1]"),
        ([2**31], "prompt[0]"), ([1] * 5000, "prompt"), ([[1]] * 1025, "prompt"),
    )],
]  # fmt: skip
PROMPT_FIELDS: list[tuple[str, dict[str, object], str]] = [
    *[(path, {"cache_salt": value}, "cache_salt") for path in (CHAT, TEXT) for value in ("", 1, "x" * 257, {})],
    *[(path, {"truncate_prompt_tokens": value}, "truncate_prompt_tokens") for path in (CHAT, TEXT) for value in (0, -2, "1", 1.5, 4097)],
    *[(CHAT, {"reasoning_effort": value}, "reasoning_effort") for value in ("zzz", "", 1, "HIGH")],
    *[(CHAT, {"verbosity": value}, "verbosity") for value in ("zzz", "", 1)],
    (CHAT, {"continue_final_message": True}, "continue_final_message"),
    (CHAT, {"continue_final_message": "yes"}, "continue_final_message"),
    *[
        (CHAT, {"continue_final_message": True, "messages": GOOD_CHAT["messages"] + [last], **more}, "continue_final_message")
        for last, more in (
            ({"role": "user", "content": "hi"}, {}), ({"role": "assistant", "content": ""}, {}), ({"role": "assistant"}, {}),
            ({"role": "assistant", "content": "I"}, {"add_generation_prompt": True}),
            ({"role": "assistant", "content": "I", "tool_calls": [{"function": {"name": "f"}}]}, {}),
        )
    ],
    *[(TEXT, {"suffix": "end", **more}, "suffix") for more in ({"prompt": [1, 2]}, {"echo": True}, {"truncate_prompt_tokens": 3})],
    (TEXT, {"suffix": "x" * 5000, "prompt": ["a"] * 1000}, "suffix"), (TEXT, {"suffix": 1}, "suffix"), (TEXT, {"suffix": "a\0"}, "suffix"),
    (CHAT, {"structured_outputs": {"json": {}, "disable_any_whitespace": "no"}}, "structured_outputs.disable_any_whitespace"),
]  # fmt: skip
UNBUILT: list[tuple[str, object]] = [
    ("best_of", 2),
    ("functions", [{"name": "f"}]), ("function_call", "auto"),
    ("modalities", ["text", "audio"]), ("moderation", {"model": "m"}), ("web_search_options", {"search_context_size": "low"}),
    ("chat_template", "{{ 1 }}"), ("skip_special_tokens", False), ("use_beam_search", True), ("length_penalty", 0.5),
    ("web_search_options", {}), ("typical_p", 0.9), ("logits_processors", ["x"]), ("typical_p", True),
    ("prompt_embeds", "AAAA"), ("guided_whitespace_pattern", " "), ("skip_special_tokens", 1),
]  # fmt: skip
UNBUILT_CHAT: list[tuple[str, object]] = [("echo", True), ("suffix", "end"), ("suffix", False)]
UNBUILT_TEXT: list[tuple[str, object]] = [
    ("top_logprobs", 3), ("reasoning_effort", "low"), ("reasoning_effort", "zzz"), ("continue_final_message", True),
    ("chat_template_kwargs", {"enable_thinking": False}),
]  # fmt: skip
NEUTRAL: dict[str, object] = {
    "n": 1, "best_of": 0, "logprobs": False, "top_logprobs": 0, "logit_bias": {}, "presence_penalty": 0, "frequency_penalty": 0.0,
    "repetition_penalty": 1.0, "min_p": 0.0, "response_format": {"type": "text"}, "tools": [], "tool_choice": "none",
    "functions": [{"name": "f"}], "function_call": "none", "echo": False, "suffix": None, "prompt_logprobs": None,
    "modalities": ["text"], "audio": {"voice": "x"}, "prediction": {"type": "content", "content": "x"}, "parallel_tool_calls": True, "user": "me", "priority": 3, "no_such_field": {"deep": [1, {"x": None}]},
    "stream_options": None, "stop": [], "seed": -(2**63), "skip_special_tokens": True,
}  # fmt: skip

RAW_BODIES: list[bytes] = [
    b"",
    b" ",
    b"{",
    b"}",
    b"[]",
    b"null",
    b"true",
    b"1",
    b'"x"',
    b"NaN",
    b"{]",
    b'{"model"}',
    b'{"model": tiny}',
    b"\xff\xfe",
    b'{"model": "\xff"}',
    b'{"model": "\\ud800", "messages": []}',
    b'{"model": "tiny", "messages": [{"role": "user", "content": "\\udc00"}]}',
    b'{"model": "tiny", "messages": [{"role": "user", "content": "\\ud800x"}]}',
    b'{"temperature": NaN}',
    b'{"temperature": Infinity}',
    b'{"temperature": -Infinity}',
    b'{"model": "tiny", "temperature": 1e999}',
    b"\x00",
    b'{"a": "\x00"}',
    b'{"model": "tiny",}',
    b"{'model': 'tiny'}",
    b"model=tiny&prompt=x",
    b"<xml/>",
    b"[" * 100_000,
    b'{"a":' * 100_000,
    b'{"messages": ' + b"[" * 50_000,
    b'{"model": "tiny", "tools": ' + b"[" * 300 + b"]" * 300 + b"}",
    b"\xef\xbb\xbf{}",
    b'{"model": "tiny"} trailing',
    b'{"model": "tiny", "messages": [{"role": "assistant", "tool_calls": [' + b'{"a":' * 900 + b"1" + b"}" * 900 + b"]}]} ",
    b'{"model":"tiny","messages":[{"role":"user","content":"x"}],"chat_template_kwargs":'
    + b'{"a":' * 900
    + b"99999999999999999999999"
    + b"}" * 901,
    b"{" + b'"x":1,' * 1000,
    b'{"model": "tiny", "n": ' + b"9" * 400 + b"}",
]


def test_there_are_at_least_200_malformed_requests():
    assert len(FIELDS) + len(UNBUILT) * 2 + len(RAW_BODIES) * 2 >= 200


@pytest.fixture
async def node():
    async with serve() as node:
        yield node


async def test_every_bad_field_is_named(http):
    for path, changes, param in FIELDS + PROMPT_FIELDS:
        for stream in (False, True):
            good = GOOD_CHAT if path == CHAT else GOOD_TEXT
            if stream and ("stream" in changes or "stream_options" in changes):
                continue
            async with http.post(path, json=good | ({"stream": True} if stream else {}) | changes) as answer:
                error = check_error(answer.status, await answer.text(), param)
                assert answer.headers["X-Request-Id"]
                assert param.split("[")[0].split(".")[0] in error["message"], error


async def test_fields_that_are_not_built_are_refused_by_name(http):
    for path, good, own in ((CHAT, GOOD_CHAT, UNBUILT_CHAT), (TEXT, GOOD_TEXT, UNBUILT_TEXT)):
        for name, value in UNBUILT + own:
            async with http.post(path, json=good | {name: value}) as answer:
                error = check_error(answer.status, await answer.text(), name)
                assert (answer.status, error["code"]) == (400, "unsupported_parameter")


async def test_neutral_values_and_unknown_fields_are_accepted(http):
    for path, good in ((CHAT, GOOD_CHAT), (TEXT, GOOD_TEXT)):
        async with http.post(path, json=good | NEUTRAL) as answer:
            assert answer.status == 200, await answer.text()
        for name in NEUTRAL:
            async with http.post(path, json=good | {name: None}) as answer:
                assert answer.status == 200, (name, await answer.text())
        async with http.post(path, json=good | {"functions": [{"name": "f"}]}) as answer:
            check_error(answer.status, await answer.text(), "functions")


def test_what_asks_for_nothing_is_accepted_and_what_is_much_like_it_is_not():
    bodies: list[tuple[type[Struct], Parse, dict[str, object]]] = [
        (chat.ChatBody, chat.parse, GOOD_CHAT),
        (completions.CompletionBody, completions.parse, GOOD_TEXT),
        (embeddings.EmbeddingsBody, embeddings.parse, {"model": "mid", "input": "x"}),
        (rerank.RerankBody, rerank.parse, {"model": "mid", "query": "x", "documents": ["x"]}),
        (score.ScoreBody, score.parse, {"model": "mid", "text_1": "x", "text_2": "x"}),
    ]
    for body, parsed, good in bodies:
        for name, values in neutral_values(body).items():
            for value in ("null", *values):
                parsed(json.dumps(good)[:-1].encode() + f', "{name}": {value}}}'.encode())
            like = {"1": "true", "true": "1", "false": "0", "0": "false", "[]": "{}"}
            for value in ['{"a": 1}', *(like[value] for value in values if value in like)]:
                with pytest.raises(BadRequest) as error:
                    parsed(json.dumps(good)[:-1].encode() + f', "{name}": {value}}}'.encode())
                assert error.value.param == name


async def test_whole_numbers_may_be_written_with_a_fraction_or_an_exponent(node, http):
    ints = {"max_tokens": 5.0, "n": 1.0, "top_k": 4e1, "seed": -7.0, "stop_token_ids": [3.0, 30.0e0], "min_tokens": 0.0}
    told = 'say 5.0 or "6.00" or 1e3'
    for path, own in (
        (CHAT, {"messages": [{"role": "user", "content": told}]}),
        (TEXT, {"prompt": told}),
        (TEXT, {"prompt": [1.0, 2]}),
    ):
        async with http.post(path, json={"model": "tiny", **own, **ints}) as answer:
            assert answer.status == 200, await answer.text()
        generation = node.requests.submitted[-1]
        params = generation.params
        assert (params.max_tokens, params.top_k, params.seed, params.stop_token_ids) == (5, 40, -7, [3, 30])
        assert generation.prompt == ([1, 2] if own.get("prompt") == [1, 2] else list(told.encode()))
    async with http.post("/detokenize", json={"model": "tiny", "tokens": [72.0, 105.0]}) as answer:
        assert (await answer.json())["prompt"] == "Hi"


async def test_a_byte_order_mark_is_passed_over(http):
    for path, good in ((CHAT, GOOD_CHAT), (TEXT, GOOD_TEXT)):
        data = b"\xef\xbb\xbf" + json.dumps(good).encode()
        async with http.post(path, data=data, headers={"Content-Type": "application/json"}) as answer:
            assert answer.status == 200, await answer.text()


async def test_other_fractions_are_no_integers(http):
    for value in (b"5.5", b"5.0001", b"1e400", b"1e30", b"5e-1"):
        body = b'{"model": "tiny", "prompt": "x", "max_tokens": %b}' % value
        async with http.post(TEXT, data=body, headers={"Content-Type": "application/json"}) as answer:
            check_error(answer.status, await answer.text(), "max_tokens")


async def test_missing_fields_are_named(http):
    for path, body, param in (
        (CHAT, {"model": "tiny"}, "messages"),
        (CHAT, {"messages": GOOD_CHAT["messages"]}, "model"),
        (TEXT, {"model": "tiny"}, "prompt"),
        (TEXT, {"prompt": "x"}, "model"),
        (CHAT, {}, "messages"),
    ):
        async with http.post(path, json=body) as answer:
            check_error(answer.status, await answer.text(), param)


async def test_broken_bodies(http):
    for body in RAW_BODIES:
        for path in (CHAT, TEXT):
            async with http.post(path, data=body, headers={"Content-Type": "application/json"}) as answer:
                check_error(answer.status, await answer.text())


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=12,
)
KNOWN = st.sampled_from(
    [
        "model",
        "messages",
        "prompt",
        "temperature",
        "top_p",
        "top_k",
        "seed",
        "max_tokens",
        "min_tokens",
        "stop",
        "stop_token_ids",
        "stream",
        "stream_options",
        "n",
        "logprobs",
        "tools",
        "response_format",
        "regex",
        "structured_outputs",
        "user",
        "priority",
        "chat_template_kwargs",
        "suffix",
        "echo",
        "ignore_eos",
        "system",
        "tool_choice",
        "thinking",
        "output_config",
        "stop_sequences",
    ]
)


@given(
    st.dictionaries(KNOWN, JSON, max_size=6),
    st.sampled_from([chat.parse, completions.parse, messages_api.parse, messages_api.parse_count]),
)
@settings(max_examples=500, deadline=None)
def test_any_json_parses_or_names_what_is_wrong(fields, parse):
    error = refusal(parse, json.dumps(fields).encode())
    if error is not None and error.code != "invalid_json":
        assert error.code in ("invalid_request", "unsupported_parameter")
        assert error.param


@pytest.mark.parametrize(
    ("parse", "fields", "says"),
    [
        (
            messages_api.parse,
            {"messages": [{"role": "tool", "content": "a"}]},
            "messages[0].role must be one of user, assistant, system, not 'tool'",
        ),
        (
            messages_api.parse,
            {"thinking": {"type": "x" * 999}},
            f"thinking.type must be one of enabled, disabled, adaptive, not '{'x' * 63}",
        ),
        (embeddings.parse, {"encoding_format": "x"}, "encoding_format must be one of float, base64, not 'x'"),
        (chat.parse, {"tools": [{"type": "x"}]}, "tools[0].type must be function, not 'x'"),
        (ollama_chat.parse, {"think": "x"}, "think must be one of minimal, low, medium, high, max, or a boolean, not 'x'"),
        (responses_api.parse, {"tool_choice": "x"}, "tool_choice must be one of none, auto, required, or an object, not 'x'"),
        (responses_api.parse, {"truncation": "auto"}, 'truncation is not supported by this server, only "disabled"'),
        (responses_api.parse, {"metadata": {"a": "b", "c": 5}}, 'metadata["c"]: Expected `string`, got `integer`'),
        (chat.parse, {"modalities": ["audio"]}, 'modalities is not supported by this server, only [] or ["text"]'),
        (chat.parse, {"stop": 5}, "stop: Expected `string | array`, got `integer`"),
        (chat.parse, {"stream": 1}, "stream: Expected `boolean`, got `integer`"),
        (chat.parse, {"logit_bias": {"7": 1, "1": 101}}, 'logit_bias["1"]: Expected `number` <= 100.0'),
    ],
)
def test_a_refused_field_is_told_what_it_may_be(parse: Parse, fields: dict[str, object], says: str) -> None:
    good = {"input": "a"} if parse is responses_api.parse else {"max_tokens": 1, "input": "a", **GOOD_CHAT}
    error = refusal(parse, json.dumps(good | fields).encode())
    assert error is not None
    assert error.message == says


def refusal(parse: Parse, body: bytes) -> BadRequest | None:
    try:
        head, prompt = parse(body)
    except BadRequest as error:
        return error
    assert isinstance(prompt, bytes)
    assert head.num_prompts >= 1
    return None


@given(st.binary(max_size=64) | st.text(string.printable, max_size=64).map(str.encode))
@settings(max_examples=300, deadline=None)
def test_any_bytes_are_refused_or_parsed(body):
    error = refusal(chat.parse, body)
    assert error is not None
    assert error.status == 400


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (r'{"model":"a","messages":[{"role":"user","content":"\ud83d"}]}', r"\ud83d is half a surrogate pair (byte 51)"),
        (r'{"model":"a","messages":[{"role":"user","content":"\\ud83d', "Input data was truncated"),
        (r'{"model":"a","messages":[{"role":"user","content":"\ud83d\ude00', "Input data was truncated"),
    ],
)
def test_half_a_character_is_told_apart_from_half_a_body(text: str, says: str) -> None:
    error = refusal(chat.parse, text.encode())
    assert error is not None
    assert (error.code, error.message) == ("invalid_json", f"the request body is not valid JSON: {says}")
