"""Fields that change the prompt or what it shares with others: what the text helper and the dispatcher are given."""

from __future__ import annotations

import json
from typing import Any

import aiohttp
import msgspec
import pytest

from daemon.api.bodies import chat, completions
from tests.daemon.api.fakes import entry, serve

MESSAGES = [{"role": "user", "content": "hello there"}]


@pytest.fixture
async def node():
    async with serve(models=[entry(max_model_len=32)]) as node:
        yield node


async def ask(node: Any, path: str, **body: object) -> dict[str, Any]:
    async with aiohttp.ClientSession(node.url) as http, http.post(path, json={"model": "tiny", "max_tokens": 2, **body}) as answer:
        assert answer.status == 200, await answer.text()
        told: dict[str, Any] = await answer.json()
        return told


async def test_the_end_of_a_prompt_is_kept_and_counted(node):
    for prompt, keep, kept in (
        ("hello there", 5, "there"),
        (list(b"hello there"), 5, "there"),
        ("hello", 20, "hello"),
        ("x" * 100 + "end", -1, ("x" * 100 + "end")[-30:]),
        (list(b"x" * 100 + b"end"), -1, ("x" * 100 + "end")[-30:]),
    ):
        told = await ask(node, "/v1/completions", prompt=prompt, truncate_prompt_tokens=keep)
        assert bytes(node.requests.submitted[-1].prompt).decode() == kept
        assert told["usage"]["prompt_tokens"] == len(kept)
    told = await ask(node, "/v1/chat/completions", messages=MESSAGES, truncate_prompt_tokens=5)
    assert bytes(node.requests.submitted[-1].prompt).decode() == "there"


async def test_an_echo_shows_what_was_kept(node):
    told = await ask(node, "/v1/completions", prompt="hello there", truncate_prompt_tokens=5, echo=True, max_tokens=0)
    assert told["choices"][0]["text"] == "there"


async def test_the_salt_goes_to_the_scheduler(node):
    for path, body in (("/v1/completions", {"prompt": "hi"}), ("/v1/chat/completions", {"messages": MESSAGES})):
        await ask(node, path, **body, cache_salt="s", n=2)
        assert [each.cache_salt for each in node.requests.submitted[-2:]] == ["s", "s"]
        await ask(node, path, **body)
        assert node.requests.submitted[-1].cache_salt == ""


def chat_options(**fields: object) -> dict[str, Any]:
    head, _ = chat.parse(json.dumps({"messages": MESSAGES, **fields}).encode())
    return {**head.options, "kwargs": msgspec.msgpack.decode(head.options["kwargs"])}


def test_the_template_is_given_reasoning_effort_and_verbosity() -> None:
    assert chat_options()["kwargs"] == {}
    assert chat_options(reasoning_effort="high")["kwargs"] == {"reasoning_effort": "high"}
    assert chat_options(reasoning_effort="none")["kwargs"] == {"reasoning_effort": "none", "enable_thinking": False}
    assert chat_options(reasoning_effort="max")["kwargs"] == {"reasoning_effort": "xhigh"}
    assert chat_options(verbosity="low")["kwargs"] == {"verbosity": "low"}
    assert chat_options(verbosity="low", chat_template_kwargs={"verbosity": "x"})["kwargs"] == {"verbosity": "x"}
    kwargs = {"enable_thinking": True, "reasoning_effort": "max"}
    assert chat_options(reasoning_effort="none", chat_template_kwargs=kwargs)["kwargs"] == kwargs


def test_a_continued_message_gets_no_generation_prompt() -> None:
    last = {"role": "assistant", "content": "The sky"}
    options = chat_options(messages=[*MESSAGES, last], continue_final_message=True)
    assert (options["continue_final_message"], options["add_generation_prompt"]) == ("answer", False)
    parts = [{"type": "text", "text": "<think>well"}]
    options = chat_options(messages=[*MESSAGES, {**last, "content": parts}], continue_final_message=True)
    assert options["continue_final_message"] == "reasoning"
    assert chat_options(continue_final_message=False)["add_generation_prompt"] is True


def test_compact_answers_keep_their_schema() -> None:
    for flag in (True, False, None):
        body = {"prompt": "x", "structured_outputs": {"json": {"b": {}, "a": {}}, "disable_any_whitespace": flag}}
        head, _ = completions.parse(json.dumps(body).encode())
        assert head.grammar == ("compact_json:" if flag else "json_schema:") + '{"b": {}, "a": {}}'
    body = {"prompt": "x", "structured_outputs": {"regex": "a", "disable_any_whitespace": True}}
    assert completions.parse(json.dumps(body).encode())[0].grammar == "regex:a"
