"""Ollama's API through its official client, with replies written by hand; what is refused, and how a body is read."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import re
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any

import aiohttp
import ollama
import pytest

from daemon.access.admission import Access
from daemon.access.keys import Keys
from daemon.access.tenant import Key, Tenant
from daemon.contracts import Generation, Resident
from daemon.errors import NotNow
from daemon.streams import stream_clock
from daemon.text.jobs import TextFacts
from engine.protocol import FINISH_LENGTH
from loader.formats.registry import FORMATS
from tests.daemon.api.fakes import Node, Settings, entry, serve, text_script

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    },
    {"type": "function", "function": {"name": "stop", "parameters": {"type": "object"}}},
]
HELLO: list[Any] = [{"role": "user", "content": "hi"}]
GOOD: dict[str, Any] = {"model": "tiny", "messages": HELLO}
KOELN = {"city": "Köln \U0001f600"}
CALL = f'<tool_call>\n{{"name": "get_weather", "arguments": {json.dumps(KOELN, ensure_ascii=False)}}}\n</tool_call>'
# reply -> its thinking, text and calls
REPLIES: dict[str, tuple[str, str, str, list[Any]]] = {
    "text": ("Hello.", "", "Hello.", []),
    "nothing": ("", "", "", []),
    "thinking": ('<think>why "so"\n</think>\n\nBecause.', 'why "so"', "Because.", []),
    "call": (CALL, "", "", [("get_weather", KOELN)]),
    "all": (f"<think>hm</think>Wait.\n{CALL}{CALL}", "hm", "Wait.", [("get_weather", KOELN)] * 2),
    "no arguments": ('<tool_call>{"name": "stop"}</tool_call>', "", "", [("stop", {})]),
    "broken": (
        'So <tool_call>{"name": "stop", "arguments": {"a": oops}}</tool_call>.',
        "",
        'So <tool_call>{"name": "stop", "arguments": {"a": oops}}</tool_call>.',
        [],
    ),
    "malformed": ("<tool_call>{oops}</tool_call>", "", "<tool_call>{oops}</tool_call>", []),
}


def client(node: Node) -> ollama.AsyncClient:
    return ollama.AsyncClient(node.url)


def calls_of(message: Any) -> list[Any]:
    return [(call.function.name, call.function.arguments) for call in message.tool_calls or []]


async def joined(parts: AsyncIterator[Any]) -> tuple[str, str, list[Any], list[Any]]:
    """Returns a streamed chat's thinking, text, calls and lines."""
    lines = [line async for line in parts]
    thinking = "".join(line.message.thinking or "" for line in lines)
    text = "".join(line.message.content or "" for line in lines)
    return thinking, text, [call for line in lines for call in calls_of(line.message)], lines


@pytest.mark.parametrize("name", REPLIES)
async def test_the_official_client_reads_chats_streamed_and_not(name: str) -> None:
    reply, thinking, content, calls = REPLIES[name]
    models = [entry(tool_parser="hermes", reasoning_parser="think")]
    async with serve(lambda _: text_script(reply.encode()), models=models) as node, client(node) as opened:
        whole = await opened.chat("tiny", HELLO, tools=TOOLS)
        assert (whole.message.thinking or "", whole.message.content, calls_of(whole.message)) == (thinking, content, calls)
        told = await joined(await opened.chat("tiny", HELLO, tools=TOOLS, stream=True))
    assert told[:3] == (thinking, content, calls)
    lines = told[3]
    assert [line.done for line in lines] == [False] * (len(lines) - 1) + [True]
    for last in (whole, lines[-1]):
        assert (last.done, last.done_reason, last.model, last.message.role) == (True, "stop", "org/tiny", "assistant")
        assert (last.prompt_eval_count, last.eval_count) == (2, len(reply.encode()) + 1)
        assert last.total_duration > 0
        assert abs(datetime.fromisoformat(last.created_at) - datetime.now(UTC)).total_seconds() < 60


async def test_the_text_after_the_reasoning_comes_a_token_a_line() -> None:
    async with (
        serve(lambda _: text_script(b"<think>a</think>Hello"), models=[entry(reasoning_parser="think")]) as node,
        client(node) as opened,
    ):
        lines = [line async for line in await opened.chat("tiny", HELLO, stream=True)]
        assert [line.message.content for line in lines if line.message.content] == list("Hello")


@pytest.mark.parametrize("stream", [False, True])
async def test_generate(stream: bool) -> None:
    models = [entry(reasoning_parser="think")]
    async with serve(lambda _: text_script(b'<think>a</think>"b"'), models=models) as node, client(node) as opened:
        for raw, thinking, response in ((None, "a", '"b"'), (True, "", '<think>a</think>"b"')):
            told = await opened.generate("tiny", "hi", raw=raw, stream=stream)
            lines = [line async for line in told] if stream else [told]
            assert "".join(line.thinking or "" for line in lines) == thinking
            assert "".join(line.response for line in lines) == response
            assert (lines[-1].done, lines[-1].done_reason, lines[-1].prompt_eval_count) == (True, "stop", 2)
        assert bytes(node.requests.submitted[-1].prompt) == b"hi"
        await opened.generate("tiny", "hi", system="Be brief.")
        assert bytes(node.requests.submitted[-1].prompt) == b"Be brief.hi"  # the fake's chat template joins contents


async def test_a_stream_is_the_default_and_a_json_object_a_line() -> None:
    async with serve(lambda _: text_script("aé\n".encode())) as node, aiohttp.ClientSession(node.url) as http:
        for path, body in (("/api/chat", GOOD), ("/api/generate", {"model": "tiny", "prompt": "hi"})):
            async with http.post(path, json=body) as answer:
                assert answer.headers["Content-Type"] == "application/x-ndjson"
                text = await answer.text()
            lines = [json.loads(line) for line in text.removesuffix("\n").split("\n")]
            said = [line["message"]["content"] if path == "/api/chat" else line["response"] for line in lines]
            assert "".join(said) == "aé\n"
            assert len(lines) == 4
            assert [line["done"] for line in lines] == [False, False, False, True]
            assert all(re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", line["created_at"]) for line in lines)


async def test_a_silent_stream_gets_no_comments_and_its_refusal_a_status(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_clock, "HOLD_STATUS_S", 0.1)
    settings = Settings(sse_comment_every_s=0.1)
    async with (
        serve(lambda _: text_script(b"ab", delay_s=0.6), settings) as node,
        aiohttp.ClientSession(node.url) as http,
        http.post("/api/chat", json=GOOD) as answer,
    ):
        assert [json.loads(line)["message"]["content"] for line in (await answer.text()).splitlines()] == ["a", "b", ""]
    refused: Any = [0.6, NotNow("wait_exceeded", "too late")]
    async with serve(lambda _: refused, settings) as node, client(node) as opened:
        with pytest.raises(ollama.ResponseError, match="too late") as error:
            await joined(await opened.chat("tiny", HELLO, stream=True))
        assert error.value.status_code == 503


async def test_done_reasons() -> None:
    async with serve(lambda _: text_script(b"one two three")) as node, client(node) as opened:
        for stream in (False, True):
            last = await _last(opened, stream, options={"stop": ["two"]})
            assert last.done_reason == "stop"
        told = await opened.chat("tiny", HELLO, options={"stop": "two"})
        assert told.message.content == "one "
    full = [entry(max_model_len=10, generation_defaults={"max_tokens": 3})]
    async with serve(lambda g: [([97] * g.params.max_tokens, FINISH_LENGTH)], models=full) as node, client(node) as opened:
        for stream in (False, True):
            for num_predict, wanted in ((5, 5), (500, 8), (-1, 8), (-2, 8), (0, 8), (None, 3)):
                last = await _last(opened, stream, options={"num_predict": num_predict})
                assert (last.done_reason, last.eval_count) == ("length", wanted)
        with pytest.raises(ollama.ResponseError, match="messages: the prompt is too long: 10 tokens > 9 maximum"):
            await opened.chat("tiny", [{"role": "user", "content": "x" * 10}])
        with pytest.raises(ollama.ResponseError, match="prompt: the prompt is too long: 10 tokens > 9 maximum"):
            await opened.generate("tiny", "x" * 10)


async def _last(opened: ollama.AsyncClient, stream: bool, **options: Any) -> Any:
    told = await opened.chat("tiny", **{"messages": HELLO, "stream": stream, **options})
    return [line async for line in told][-1] if stream else told


async def test_a_call_that_is_cut_short_is_left_out() -> None:
    cut = CALL[: CALL.index("Köln")].encode()
    models = [entry(tool_parser="hermes")]
    async with serve(lambda _: [(list(cut), FINISH_LENGTH)], models=models) as node, client(node) as opened:
        for stream in (False, True):
            last = await _last(opened, stream, tools=TOOLS)
            assert (calls_of(last.message), last.done_reason) == ([], "length")


async def test_durations_are_those_of_the_sequence() -> None:
    def script(generation: Generation) -> Any:
        now = time.monotonic()
        generation.arrived_s, generation.submitted_s, generation.first_token_s = now - 5, now - 4, now - 1
        return text_script(b"x")

    async with serve(script) as node, client(node) as opened:
        for stream in (False, True):
            last = await _last(opened, stream)
            assert (last.load_duration / 1e9, last.prompt_eval_duration / 1e9) == (pytest.approx(1), pytest.approx(3))
            assert 1 <= last.eval_duration / 1e9 < 2
    async with serve() as node, client(node) as opened:  # nothing is known of its times but its arrival
        last = await _last(opened, False)
        assert (last.load_duration, last.prompt_eval_duration, last.eval_duration) == (None, None, None)


@pytest.mark.parametrize("stream", [False, True])
async def test_nothing_to_answer_loads_the_model(stream: bool) -> None:
    models = [entry(bos_token_id=65), entry("org/enc", embedding_size=4, aliases=())]
    async with serve(models=models) as node, client(node) as opened:
        last = await _last(opened, stream, messages=[], keep_alive="10m")
        assert (last.done, last.done_reason, last.message.content, last.eval_count) == (True, "load", "", None)
        told: Any = await opened.generate("tiny", stream=stream)
        last = [line async for line in told][-1] if stream else told
        assert (last.done, last.done_reason, last.response) == (True, "load", "")
        for generation in node.requests.submitted:
            assert (generation.prompt, generation.params.max_tokens) == ([65], 1)
        assert [generation.keep_alive_s for generation in node.requests.submitted] == [600, None]
        with pytest.raises(ollama.ResponseError, match="makes embeddings and generates no text"):
            await opened.generate("org/enc")
        node.requests.script = lambda _: [NotNow("would_not_fit", "no room")]
        with pytest.raises(ollama.ResponseError, match="no room") as error:
            await opened.generate("tiny")
        assert error.value.status_code == 503


async def test_options_reach_the_engine() -> None:
    options = {
        "num_predict": 7, "temperature": 0.5, "top_p": 0.9, "top_k": 20, "min_p": 0.05, "seed": 42, "repeat_penalty": 1.1,
        "presence_penalty": 0.25, "frequency_penalty": 0.75, "num_ctx": 8192, "num_gpu": 99, "use_mmap": True, "mirostat": 0,
        "tfs_z": 1.0, "typical_p": 1.0, "repeat_last_n": -1, "penalize_newline": True, "num_keep": 4,
    }  # fmt: skip
    async with serve() as node, client(node) as opened:
        await opened.chat("tiny", HELLO, options=options, keep_alive="5m")
        await opened.generate("tiny", "hi", options=options, keep_alive=-1, raw=True)
        await opened.generate("tiny", "hi", options={"seed": -1})
        for generation in node.requests.submitted[:2]:
            params = generation.params
            assert (params.max_tokens, params.temperature, params.top_p, params.top_k) == (7, 0.5, 0.9, 20)
            assert (params.min_p, params.seed, params.repetition_penalty) == (0.05, 42, 1.1)
            assert (params.presence_penalty, params.frequency_penalty) == (0.25, 0.75)
        assert node.requests.submitted[2].params.seed != -1
        assert [generation.keep_alive_s for generation in node.requests.submitted] == [300, math.inf, None]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_keep_alive_of_0_without_a_prompt_unloads(stream: bool) -> None:
    async with serve() as node, client(node) as opened:
        last = await _last(opened, stream, messages=[], keep_alive=0)
        assert (last.done, last.done_reason, last.message.content) == (True, "unload", "")
        told: Any = await opened.generate("tiny", keep_alive="0s", stream=stream)
        last = [line async for line in told][-1] if stream else told
        assert (last.done, last.done_reason, last.response) == (True, "unload", "")
        assert node.requests.kept == [("org/tiny", 0), ("org/tiny", 0)]
        assert not node.requests.submitted, "nothing is loaded for it"
        await opened.generate("tiny", "hi", keep_alive=0)
        assert node.requests.submitted[0].keep_alive_s == 0


async def test_the_format_is_a_grammar() -> None:
    schema = {"type": "object", "properties": {"b": {"type": "string"}, "a": {"type": "string"}}}
    async with serve() as node, client(node) as opened:
        for format in ("json", schema, ""):
            await opened.chat("tiny", HELLO, format=format)  # type: ignore[arg-type]
            await opened.generate("tiny", "hi", format=format, raw=True)  # type: ignore[arg-type]
        grammars = [generation.params.grammar for generation in node.requests.submitted]
    as_json = 'json_schema:{"type":"object"}'
    assert grammars[:2] == [as_json, as_json]
    assert json.loads(grammars[2].removeprefix("json_schema:")) == schema
    assert grammars[3:] == [grammars[2], "", ""]


async def test_errors_have_ollamas_form() -> None:
    async with serve() as node, client(node) as opened:
        with pytest.raises(ollama.ResponseError) as missing:
            await opened.chat("nobody", HELLO)
        assert missing.value.status_code == 404
        node.requests.refusal = NotNow("queue_full", "full", status=429, retry_after_s=3.0)
        for stream in (False, True):
            with pytest.raises(ollama.ResponseError) as full:
                await _last(opened, stream)
            assert (full.value.error, full.value.status_code) == ("full", 429)
        with pytest.raises(ollama.ResponseError, match=r"^format: \d+ characters are more than"):
            await opened.generate("tiny", "hi", format={"title": "x" * 70_000})
        async with aiohttp.ClientSession(node.url) as http:
            async with http.get("/api/chat") as answer:
                assert (answer.status, list(await answer.json())) == (405, ["error"])
            for path in ("/api/pull", "/api/push", "/api/create", "/api/delete", "/api/copy"):
                async with http.post(path, json={"model": "tiny"}) as answer:
                    assert answer.status == 404


async def test_an_error_in_a_stream_is_a_line() -> None:
    script: Any = [([104], 0), NotNow("unloaded", "it was unloaded")]
    async with serve(lambda _: script) as node, client(node) as opened:
        with pytest.raises(ollama.ResponseError, match="it was unloaded"):
            await _last(opened, True)


async def test_a_client_that_is_gone_ends_its_stream() -> None:
    async with serve(lambda _: text_script(b"a" * 500, delay_s=0.01)) as node, client(node) as opened:
        told = await opened.chat("tiny", HELLO, stream=True)
        async for _ in told:
            break
        await told.aclose()
        await asyncio.wait_for(node.requests.cancel_event.wait(), 10)


async def test_one_models_own_path() -> None:
    async with serve(models=[entry(), entry("org/other", aliases=())]) as node, ollama.AsyncClient(f"{node.url}/m/tiny") as opened:
        assert (await opened.generate("org/other", "hi")).model == "org/tiny"  # the path's model comes before the body's
        async with aiohttp.ClientSession(node.url) as http, http.post("/m/tiny/api/show", json={}) as answer:
            assert answer.status == 200
        assert [model.model for model in (await opened.list()).models] == ["org/tiny"]


# ---- what there is


async def test_a_models_name_may_have_the_tag_latest() -> None:
    models = [entry(), entry("org/new:latest", aliases=())]
    async with serve(models=models) as node, client(node) as opened:
        assert (await opened.chat("tiny:latest", HELLO)).model == "org/tiny"
        assert (await opened.chat("org/new:latest", HELLO)).model == "org/new:latest"
        assert (await opened.show("org/tiny:latest")).modelinfo == {}
        for name in ("org/new", "tiny:8b", ":latest"):
            with pytest.raises(ollama.ResponseError):
                await opened.chat(name, HELLO)


LLAMA = {"architecture": "LlamaForCausalLM", "dtype": "bfloat16", "weights_bytes": 2 << 30, "num_parameters": 1_240_000_000}


async def test_tags_name_the_type_of_quantised_weights_without_their_groups() -> None:
    held = [name for name in FORMATS if name]
    models = [entry(f"m{at}", aliases=(), quantize=name, dtype="bfloat16") for at, name in enumerate(held)]
    async with serve(models=models) as node, client(node) as opened:
        details = {one.model: one.details for one in (await opened.list()).models}
    levels = {name: details[f"m{at}"].quantization_level for at, name in enumerate(held)}  # type: ignore[union-attr]
    assert set(levels.values()) == {"INT8", "PACKED", "FP8", "INT4", "GPTQ", "AWQ", "MXFP4", "NVFP4"}
    assert all(level.lower() in name for name, level in levels.items())


async def test_tags_and_show_tell_what_is_known() -> None:
    models = [
        entry(**LLAMA),
        entry("org/bert", aliases=(), embedding_size=384, architecture="BertModel", dtype="float32", num_parameters=33_400_000),
        entry("org/int8", aliases=(), quantize="int8", dtype="float32", reasoning_parser="none", tool_parser="none"),
    ]
    async with serve(models=models) as node, client(node) as opened:
        bert, int8, tiny = (await opened.list()).models
        assert (tiny.model, tiny.size, tiny.digest) == ("org/tiny", 2 << 30, "f")
        assert tiny.modified_at == datetime(2023, 11, 14, 22, 13, 20, tzinfo=UTC)
        details: Any = tiny.details
        assert (details.format, details.family, details.families) == ("safetensors", "llama", ["llama"])
        assert (details.parameter_size, details.quantization_level) == ("1.2B", "BF16")
        assert (bert.details.family, bert.details.parameter_size) == ("bert", "33M")  # type: ignore[union-attr]
        assert (int8.size, int8.details.family, int8.details.quantization_level) == (None, None, "INT8")  # type: ignore[union-attr]
        node.text.known_facts = TextFacts(tool_parser="hermes", reasoning_parser="think")
        told = await opened.show("tiny")
        assert told.capabilities == ["completion", "tools", "thinking"]
        assert told.modelinfo == {
            "general.architecture": "llama",
            "llama.context_length": 4096,
            "general.parameter_count": 1_240_000_000,
        }
        assert (await opened.show("org/bert")).capabilities == ["embedding"]
        assert (await opened.show("org/bert")).modelinfo["bert.embedding_length"] == 384  # type: ignore[index]
        assert (await opened.show("org/int8")).capabilities == ["completion"]
        async with aiohttp.ClientSession(node.url) as http:
            async with http.post("/api/show", json={"name": "tiny"}) as answer:
                assert answer.status == 200
            async with http.get("/api/version") as answer:
                assert re.fullmatch(r"\d+\.\d+\.\d+", (await answer.json())["version"])


async def test_ps_shows_what_is_in_memory() -> None:
    async with serve(models=[entry(**LLAMA), entry("org/other")]) as node, client(node) as opened:
        assert (await opened.ps()).models == []
        node.health.loaded = {"org/tiny": Resident(300, 200), "gone": Resident(1, 0)}
        (model,) = (await opened.ps()).models
        assert (model.model, model.size, model.size_vram, model.context_length) == ("org/tiny", 300, 200, 4096)
        assert model.expires_at is not None
        assert model.expires_at > datetime.now(UTC) + timedelta(days=36500)
        node.health.loaded = {"org/tiny": Resident(300, 200, 2_000_000_000.5)}
        (model,) = (await opened.ps()).models
        assert model.expires_at == datetime.fromtimestamp(2_000_000_000, UTC)


async def test_a_tenant_sees_the_models_it_may_use() -> None:
    tenants = {"all": Tenant("all"), "some": Tenant("some", 1.0, ("org/tiny",), False, re.compile(r"org/tiny\Z"))}
    access = Access(Keys(tenants, {hashlib.sha256(f"{name}-key".encode()).digest(): Key(tenants[name]) for name in tenants}))
    async with serve(models=[entry(), entry("org/other", aliases=())], access=access) as node:
        node.health.loaded = {"org/tiny": Resident(1, 0), "org/other": Resident(1, 0)}
        for name, num in (("all", 2), ("some", 1)):
            async with ollama.AsyncClient(node.url, headers={"Authorization": f"Bearer {name}-key"}) as opened:
                assert len((await opened.list()).models) == len((await opened.ps()).models) == num
        async with client(node) as opened:
            with pytest.raises(ollama.ResponseError) as error:
                await opened.list()
            assert error.value.status_code == 401


async def test_bodies_of_embeddings_are_read() -> None:
    def script(generation: Generation) -> Any:
        generation.vector = b"\0\0\x80\x3f" * 4
        return [([], 1)]

    models = [entry(), entry("org/enc", aliases=("enc",), embedding_size=4, cut_sizes=(2,), max_model_len=8)]
    async with serve(script, models=models) as node, client(node) as opened:
        told = await opened.embed("enc", "abc")
        assert (told.model, told.embeddings, told.prompt_eval_count) == ("org/enc", [[1.0, 1.0, 1.0, 1.0]], 3)
        assert (told.total_duration or 0) > 0
        told = await opened.embed("enc:latest", ["abc", "de"], dimensions=2, truncate=True)
        assert told.embeddings == [[pytest.approx(2**-0.5)] * 2] * 2
        assert told.prompt_eval_count == 5
        with pytest.raises(ollama.ResponseError, match=r"input\[1\] has 9 tokens, 1 more than"):
            await opened.embed("enc", ["a", "a" * 9], truncate=False)
        for truncate in (None, True):  # Ollama's default is true
            assert (await opened.embed("enc", ["a", "b" * 9], truncate=truncate)).prompt_eval_count == 1 + 8
            assert node.requests.submitted[-1].prompt == list(b"b" * 8)
        with pytest.raises(ollama.ResponseError, match="dimensions: 3 was asked for"):
            await opened.embed("enc", "a", dimensions=3)
        with pytest.raises(ollama.ResponseError, match="it has no embeddings"):
            await opened.embed("tiny", "a")


async def test_one_text_is_embedded_as_older_clients_ask_for_it() -> None:
    def script(generation: Generation) -> Any:
        generation.vector = b"\0\0\x80\x3f" * 4
        return [([], 1)]

    models = [entry(), entry("org/enc", aliases=("enc",), embedding_size=4, max_model_len=8)]
    async with serve(script, models=models) as node, client(node) as opened:
        assert (await opened.embeddings("enc:latest", "abc", keep_alive="5m")).embedding == [1.0, 1.0, 1.0, 1.0]
        assert [(each.prompt, each.keep_alive_s) for each in node.requests.submitted] == [(list(b"abc"), 300.0)]
        for model, prompt, says in (
            ("enc", "a" * 9, "prompt has 9 tokens, 1 more than"),
            ("enc", "", "prompt has no tokens"),
            ("enc", "a\0", "prompt holds a NUL character"),
            ("tiny", "a", "it has no embeddings"),
        ):
            with pytest.raises(ollama.ResponseError, match=says):
                await opened.embeddings(model, prompt)


async def test_tools_of_an_unknown_dialect_are_refused_with_what_ollama_has() -> None:
    async with serve() as node, client(node) as opened:
        with pytest.raises(ollama.ResponseError, match="set tool_parser") as error:
            await opened.chat("tiny", [{"role": "user", "content": "x"}], tools=[{"type": "function", "function": {"name": "f"}}])
        assert "tool_choice" not in error.value.error


@pytest.mark.parametrize("sent", ["application/x-www-form-urlencoded", "application/octet-stream", "text/plain;charset=UTF-8"])
async def test_content_types_of_http_libraries_are_taken_but_from_other_sites(sent: str) -> None:
    headers = {"Content-Type": sent}
    body = json.dumps({"model": "tiny", "prompt": "hi", "stream": False})
    async with serve() as node, aiohttp.ClientSession(node.url) as http:
        async with http.post("/api/generate", data=body, headers=headers) as answer:
            assert (answer.status, (await answer.json())["response"]) == (200, "ih")
        async with http.post("/api/generate", data=body, headers=headers | {"Origin": "http://evil.example"}) as answer:
            assert answer.status == 403
        async with http.post("/api/generate", data=body, headers={"Content-Type": "text/html"}) as answer:
            assert answer.status == 415
        async with http.post("/v1/completions", data=body, headers=headers) as answer:
            assert answer.status == 415


async def test_a_call_that_is_cut_before_its_arguments_is_left_out() -> None:
    cut = list(b'<tool_call>{"name": "get_weather", ')
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "tools": TOOLS}
    models = [entry(tool_parser="hermes")]
    async with serve(lambda _: [(cut, FINISH_LENGTH)], models=models) as node, aiohttp.ClientSession(node.url) as http:
        for stream in (False, True):
            async with http.post("/api/chat", json=body | {"stream": stream}) as answer:
                lines = [json.loads(line) for line in (await answer.text()).splitlines()]
            assert [line["message"] for line in lines] == [{"role": "assistant", "content": ""}]
            assert lines[-1]["done_reason"] == "length"
