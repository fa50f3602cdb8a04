"""Limits of tenants at every endpoint that generates or embeds, over a real server with nothing behind it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import pytest
from aiohttp import ClientSession

from daemon.access.admission import Access
from daemon.access.cors import Cors
from daemon.access.keys import Keys
from daemon.access.tenant import Key, Limits, Tenant
from daemon.contracts import Generation
from daemon.errors import NotNow
from daemon.text.places import Share
from engine.protocol import FINISH_NONE, FINISH_STOP
from tests.daemon.api.fakes import Script, entry, serve, text_script

PROMPT = "ten bytes."
MESSAGES = [{"role": "user", "content": PROMPT}]
GENERATING: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": MESSAGES}),
    ("/v1/completions", {"prompt": PROMPT}),
    ("/v1/responses", {"input": PROMPT}),
    ("/v1/messages", {"messages": MESSAGES, "max_tokens": 100}),
    ("/api/chat", {"messages": MESSAGES}),
    ("/api/generate", {"prompt": PROMPT, "raw": True}),
]
EMBEDDING: list[tuple[str, dict[str, Any]]] = [("/v1/embeddings", {"input": PROMPT}), ("/api/embed", {"input": PROMPT})]


def access(limits: Limits, **options: Any) -> Access:
    tenant = Tenant("t", limits=limits, **options)
    return Access(Keys({"t": tenant}, {hashlib.sha256(b"key").digest(): Key(tenant)}))


def client(url: str) -> ClientSession:
    return ClientSession(url, headers={"Authorization": "Bearer key"})


def told(headers: Mapping[str, str]) -> dict[str, str]:
    return {name.lower(): value for name, value in headers.items() if "ratelimit" in name.lower()}


@pytest.mark.parametrize(("path", "body"), [*GENERATING, *EMBEDDING])
async def test_each_endpoint_has_texts_encoded_for_the_keys_tenant(path: str, body: dict[str, Any]) -> None:
    models = [entry(embedding_size=2)] if (path, body) in EMBEDDING else None
    refused = NotNow("queue_full", "the queue is full", status=429)
    async with serve(models=models, access=access(Limits(), weight=3.0)) as node, client(node.url) as http:
        node.requests.refusal = refused
        async with http.post(path, json={"model": "tiny", **body}) as answer:
            assert answer.status == 429
        assert node.text.encoded_for == [Share("t", 3.0)]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body"), GENERATING)
async def test_each_endpoint_that_generates_counts(path: str, body: dict[str, Any], stream: bool) -> None:
    """Ten tokens of prompt, three and the end token of output."""
    limits = Limits(requests_per_minute=2, tokens_per_day=1000)
    async with serve(lambda _: text_script(b"abc"), access=access(limits)) as node, client(node.url) as http:
        found = []
        for _ in range(3):
            async with http.post(path, json={"model": "tiny", **body, "stream": stream}) as answer:
                await answer.read()
                found.append((answer.status, told(answer.headers), answer.headers.get("Retry-After")))
        assert [status for status, _, _ in found] == [200, 200, 429]
        form = "anthropic-ratelimit-{1}-{0}" if path == "/v1/messages" else "x-ratelimit-{0}-{1}"
        names = {what: form.format("remaining", what) for what in ("requests", "tokens-day")}
        assert [headers[names["requests"]] for _, headers, _ in found] == ["1", "0", "0"]
        left = [headers[names["tokens-day"]] for _, headers, _ in found]
        assert left == ["990" if stream else "986", "976" if stream else "972", "972"], "a stream's head leaves before its output"
        assert found[0][1][form.format("limit", "tokens-day")] == "1000"
        assert 1 <= int(found[2][2] or 0) <= 30
        assert len(node.requests.submitted) == 2


@pytest.mark.parametrize(("path", "body"), EMBEDDING)
async def test_each_endpoint_that_embeds_counts(path: str, body: dict[str, Any]) -> None:
    def script(generation: Generation) -> Script:
        generation.vector, generation.submitted_s = bytes(8), 1.0
        return [([], FINISH_STOP)]

    models = [entry(embedding_size=2)]
    async with serve(script, models=models, access=access(Limits(tokens_per_day=25))) as node, client(node.url) as http:
        statuses = []
        for _ in range(3):
            async with http.post(path, json={"model": "tiny", **body}) as answer:
                statuses.append(answer.status)
                await answer.read()
        assert statuses == [200, 200, 429]
        async with http.post(path, json={"model": "tiny", "input": 3 * [PROMPT]}) as answer:
            assert answer.status == 400
            assert "the prompt (input) has 30 tokens, 5 more than all of that" in await answer.text()


async def test_the_errors_have_their_apis_forms() -> None:
    limits = Limits(requests_per_minute=1, tokens_per_minute=100)
    async with serve(access=access(limits)) as node, client(node.url) as http:
        async with http.post("/v1/completions", json={"model": "tiny", "prompt": PROMPT, "max_tokens": 1}) as answer:
            assert answer.status == 200
        async with http.post("/v1/completions", json={"model": "tiny", "prompt": PROMPT}) as answer:
            error = (await answer.json())["error"]
            assert (answer.status, error["code"], error["type"], error["param"]) == (429, "rate_limit_exceeded", "requests", None)
            assert error["message"].startswith(
                "The tenant 't' may send 1 requests a minute (requests_per_minute); the next one fits in"
            )
        async with http.post("/v1/messages", json={"model": "tiny", "messages": MESSAGES, "max_tokens": 1}) as answer:
            told = await answer.json()
            assert (answer.status, told["type"], told["error"]["type"]) == (429, "error", "rate_limit_error")
        async with http.post("/api/generate", json={"model": "tiny", "prompt": PROMPT, "raw": True}) as answer:
            assert (answer.status, list(await answer.json())) == (429, ["error"])
        long = {"model": "tiny", "messages": [{"role": "user", "content": 101 * "x"}], "max_tokens": 1}
        async with http.post("/v1/chat/completions", json=long) as answer:
            error = (await answer.json())["error"]
            assert (answer.status, error["code"], error["param"]) == (400, "request_over_limit", "messages")
            assert error["message"] == (
                "The tenant 't' may use 100 tokens a minute (tokens_per_minute), and the prompt (messages) has 101 tokens, 1 more "
                "than all of that: it never fits. Send less."
            )
            assert "Retry-After" not in answer.headers


async def test_what_makes_no_tokens_does_not_count() -> None:
    async with serve(access=access(Limits(requests_per_minute=1, tokens_per_minute=20))) as node, client(node.url) as http:
        for _ in range(3):
            for method, path, body in (
                ("GET", "/v1/models", None),
                ("GET", "/healthz", None),
                ("POST", "/tokenize", {"model": "tiny", "prompt": PROMPT}),
                ("POST", "/v1/messages/count_tokens", {"model": "tiny", "messages": MESSAGES}),
                ("POST", "/v1/completions", {"model": "tiny", "prompt": PROMPT, "max_tokens": -1}),
                ("POST", "/v1/completions", {"model": "nobody", "prompt": PROMPT}),
            ):
                async with http.request(method, path, json=body) as answer:
                    assert answer.status in (200, 400, 404), path
                    assert told(answer.headers) == {}
        async with http.post("/v1/completions", json={"model": "tiny", "prompt": PROMPT, "max_tokens": 1}) as answer:
            assert answer.status == 200


async def test_several_prompts_and_answers_are_one_request() -> None:
    """Two prompts of ten tokens, three answers each; a prompt counts once."""
    async with serve(access=access(Limits(requests_per_minute=5, tokens_per_day=1000))) as node, client(node.url) as http:
        body = {"model": "tiny", "prompt": [PROMPT, PROMPT], "n": 3, "max_tokens": 2}
        async with http.post("/v1/completions", json=body) as answer:
            usage = (await answer.json())["usage"]
            assert (usage["prompt_tokens"], usage["completion_tokens"]) == (20, 12)
            headers = told(answer.headers)
        assert (headers["x-ratelimit-remaining-requests"], headers["x-ratelimit-remaining-tokens-day"]) == ("4", "968")


async def test_what_the_node_refuses_gives_its_tokens_back() -> None:
    async with serve(access=access(Limits(tokens_per_day=15))) as node, client(node.url) as http:
        node.requests.refusal = NotNow("queue_full", "full", status=429, retry_after_s=1.0)
        for _ in range(3):
            async with http.post("/v1/completions", json={"model": "tiny", "prompt": PROMPT, "max_tokens": 1}) as answer:
                assert (answer.status, (await answer.json())["error"]["code"]) == (429, "queue_full")
                assert told(answer.headers)["x-ratelimit-remaining-tokens-day"] == "15"
        node.requests.refusal = None
        async with http.post("/v1/completions", json={"model": "tiny", "prompt": PROMPT, "max_tokens": 1}) as answer:
            assert answer.status == 200


async def test_priorities() -> None:
    async with serve(access=access(Limits(), priority=-3, max_priority=1)) as node, client(node.url) as http:
        body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 1}
        for asked in ({}, {"priority": 0}, {"priority": 1}, {"priority": None}):
            async with http.post("/v1/completions", json=body | asked) as answer:
                assert answer.status == 200
        assert [generation.priority for generation in node.requests.submitted] == [-3, 0, 1, -3]
        async with http.post("/v1/completions", json=body | {"priority": 2}) as answer:
            error = (await answer.json())["error"]
            assert (answer.status, error["param"]) == (400, "priority")
            assert error["message"] == "priority: 2 is above 1, the highest that the tenant 't' may ask for (max_priority)"


async def test_an_expired_key() -> None:
    tenant, now = Tenant("t"), 1000.0
    counted: list[str] = []
    keys = Keys({"t": tenant}, {hashlib.sha256(b"key").digest(): Key(tenant, "ci", "01234567", 2000.0)})
    async with serve(access=Access(keys, count=counted.append, clock=lambda: now)) as node, client(node.url) as http:
        async with http.get("/v1/models") as answer:
            assert answer.status == 200
        now = 2000.0
        async with http.get("/v1/models") as answer:
            error = (await answer.json())["error"]
            assert (answer.status, error["code"], error["type"]) == (401, "key_expired", "authentication_error")
            assert error["message"] == "The API key expired at 1970-01-01T00:33:20Z."
            assert "WWW-Authenticate" in answer.headers
        async with http.get("/healthz") as answer:
            assert (answer.status, await answer.json()) == (200, {"status": "ok"}), "as a stranger"
    assert counted == ["expired_key"]


async def test_pages_of_other_sites_may_read_the_headers() -> None:
    class Settings:
        allowed_origins = ("https://a.example",)

    rules = access(Limits(requests_per_minute=5))
    rules.cors = Cors(Settings())
    async with serve(access=rules) as node, client(node.url) as http:
        origin = {"Origin": "https://a.example"}
        for stream in (False, True):
            body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 1, "stream": stream}
            async with http.post("/v1/completions", json=body, headers=origin) as answer:
                exposed = answer.headers["Access-Control-Expose-Headers"].split(", ")
        assert exposed == [
            *("X-Request-Id", "Retry-After"),
            *("x-ratelimit-limit-requests", "x-ratelimit-remaining-requests", "x-ratelimit-reset-requests"),
        ]
        async with http.get("/v1/models", headers=origin) as answer:
            assert answer.headers["Access-Control-Expose-Headers"] == "X-Request-Id, Retry-After"


async def test_tenants_without_limits_get_no_headers() -> None:
    async with serve(access=access(Limits())) as node, client(node.url) as http:
        for stream in (False, True):
            body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 1, "stream": stream}
            async with http.post("/v1/completions", json=body) as answer:
                assert answer.status == 200
                assert told(answer.headers) == {}


async def test_what_a_client_that_left_has_had_counts() -> None:
    """Ten tokens of prompt, and three of output before it left."""

    def script(generation: Generation) -> Script:
        return [([97], FINISH_NONE), ([98], FINISH_NONE), ([99], FINISH_NONE), 3600.0]

    async with serve(script, access=access(Limits(tokens_per_day=1000))) as node, client(node.url) as http:
        body = {"model": "tiny", "prompt": PROMPT, "stream": True}
        async with http.post("/v1/completions", json=body) as answer:
            while b'"c"' not in await answer.content.readline():
                pass
            answer.close()
        await node.requests.cancel_event.wait()
        node.requests.script = lambda _: text_script(b"")
        async with http.post("/v1/completions", json=body | {"stream": False}) as answer:
            left = told(answer.headers)["x-ratelimit-remaining-tokens-day"]
        assert left == "976", "less the second prompt and its end token"


@pytest.mark.parametrize(("path", "body"), GENERATING)
async def test_the_model_of_a_request_is_expected_until_its_first_sequence_is_submitted(path: str, body: dict[str, Any]) -> None:
    async with serve(lambda _: text_script(b"abc"), access=access(Limits(requests_per_minute=1))) as node, client(node.url) as http:
        for status in (200, 429):
            async with http.post(path, json={"model": "tiny", **body}) as answer:
                await answer.read()
                assert answer.status == status
        assert node.requests.expected == [("org/tiny", "t", 1)], "the second request was over the limit"


@pytest.mark.parametrize(("path", "body"), EMBEDDING)
async def test_models_that_embed_are_expected_too(path: str, body: dict[str, Any]) -> None:
    def script(generation: Generation) -> Script:
        generation.vector, generation.submitted_s = bytes(8), 1.0
        return [([], FINISH_STOP)]

    models = [entry(embedding_size=2)]
    async with serve(script, models=models, access=access(Limits())) as node, client(node.url) as http:
        async with http.post(path, json={"model": "tiny", **body}) as answer:
            await answer.read()
            assert answer.status == 200
        assert node.requests.expected == [("org/tiny", "t", 1)]


async def test_a_request_that_is_refused_after_its_prompt_was_read_is_expected_no_more() -> None:
    async with serve(lambda _: text_script(b"abc"), models=[entry(max_model_len=4)]) as node, ClientSession(node.url) as http:
        async with http.post("/v1/completions", json={"model": "tiny", "prompt": "longer than that"}) as answer:
            await answer.read()
            assert answer.status == 400
        async with http.post("/v1/completions", json={"model": "tiny", "prompt": "a", "n": -1}) as answer:
            await answer.read()
            assert answer.status == 400
        assert node.requests.expected == [("org/tiny", "", 0)], "the second was refused with its body"
