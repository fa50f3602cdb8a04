"""What well-formed requests get, by the official client and by hand."""

from __future__ import annotations

import asyncio
import json

import openai
import pytest

from daemon.api.body_parts import INLINE_BYTES
from engine.protocol import SamplingParams
from tests.daemon.api.fakes import EOS, VOCAB, entry, serve, text_script

MESSAGES = [{"role": "user", "content": "hello"}]


@pytest.fixture
async def node():
    async with serve(models=[entry(), entry("deep/er/model", aliases=())]) as node:
        yield node


@pytest.fixture
async def client(node):
    async with openai.AsyncOpenAI(base_url=f"{node.url}/v1", api_key="none", max_retries=0) as client:
        yield client


async def test_the_official_client_chats(client):
    answer = await client.chat.completions.create(model="tiny", messages=MESSAGES, max_completion_tokens=3, seed=-5)
    assert answer.choices[0].message.content == "oll"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "length"
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert answer.model == "org/tiny"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (5, 3, 8)
    assert answer.usage.prompt_tokens_details.cached_tokens == 0


async def test_the_official_client_streams(client):
    stream = await client.chat.completions.create(
        model="tiny", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "olleh"
    assert chunks[-1].usage.completion_tokens == 6
    assert chunks[-2].choices[0].finish_reason == "stop"


async def test_the_official_client_completes(client):
    answer = await client.completions.create(model="tiny", prompt=["abc", "de"], max_tokens=2)
    assert [(choice.index, choice.text, choice.finish_reason) for choice in answer.choices] == [
        (0, "cb", "length"),
        (1, "ed", "length"),
    ]
    assert answer.usage.completion_tokens == 4
    stream = await client.completions.create(model="tiny", prompt="abc", stream=True)
    assert "".join([chunk.choices[0].text async for chunk in stream]) == "cba"


async def test_the_official_client_understands_errors(client, node):
    with pytest.raises(openai.NotFoundError) as error:
        await client.chat.completions.create(model="nope", messages=MESSAGES, stream=True)
    assert error.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as error:
        await client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=4096)
    assert error.value.code == "context_length_exceeded"
    assert "5 prompt tokens + max_tokens 4096 = 4101" in error.value.message
    assert "this model's maximum context length is 4096 tokens (max_model_len of org/tiny)" in error.value.message


async def test_the_official_client_raises_on_an_error_in_mid_stream(client, node):
    from daemon.errors import ServerFault

    node.requests.script = lambda _: [([97], 0), 0.05, ServerFault("crashed_twice", "gone")]
    with pytest.raises(openai.APIError, match="gone"):
        async for _ in await client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True):
            pass


async def test_the_synchronous_client_works_too(node):
    def ask() -> tuple[str, list[str]]:
        with openai.OpenAI(base_url=f"{node.url}/v1", api_key="none", max_retries=0) as client:
            answer = client.chat.completions.create(model="tiny", messages=MESSAGES)
            stream = client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)
            pieces = [chunk.choices[0].delta.content or "" for chunk in stream]
            return answer.choices[0].message.content or "", pieces

    content, pieces = await asyncio.to_thread(ask)
    assert content == "olleh" == "".join(pieces)


async def test_models_are_listed_and_found_by_any_spelling(client, http):
    listed = await client.models.list()
    assert [model.id for model in listed.data] == ["deep/er/model", "org/tiny"]
    assert listed.data[0].owned_by == "hearthd"
    for path in ("org/tiny", "org%2Ftiny", "tiny", "tiny/", "org%2ftiny"):
        async with http.get(f"/v1/models/{path}") as answer:
            if path == "tiny/":
                assert answer.status == 404
                continue
            assert (answer.status, (await answer.json())["id"]) == (200, "org/tiny")
    assert (await client.models.retrieve("deep/er/model")).created == 1700000000


@pytest.mark.parametrize("scope", ["tiny", "org/tiny", "org%2Ftiny"])
async def test_every_path_lives_below_a_model_too(http, node, scope):
    body = {"messages": MESSAGES}
    async with http.post(f"/m/{scope}/v1/chat/completions", json=body) as answer:
        assert (await answer.json())["model"] == "org/tiny"
    async with http.post(f"/m/{scope}/v1/chat/completions", json=body | {"model": "somebody-elses-name"}) as answer:
        assert (await answer.json())["model"] == "org/tiny"
    async with http.post(f"/m/{scope}/v1/completions", json={"prompt": "x"}) as answer:
        assert answer.status == 200
    async with http.get(f"/m/{scope}/v1/models") as answer:
        assert [each["id"] for each in (await answer.json())["data"]] == ["org/tiny"]
    async with http.get(f"/m/{scope}/v1/models/tiny") as answer:
        assert (await answer.json())["id"] == "org/tiny"
    for path in ("healthz", "readyz", "metrics"):
        async with http.get(f"/m/{scope}/{path}") as answer:
            assert answer.status == 200


async def test_health_and_metrics(http, node):
    for path in ("/healthz", "/readyz"):
        async with http.get(path) as answer:
            assert (answer.status, (await answer.json())["status"] in ("ok", "ready")) == (200, True)
        async with http.head(path) as answer:
            assert (answer.status, await answer.read()) == (200, b"")
    async with http.get("/metrics") as answer:
        assert answer.content_type == "text/plain"
        assert await answer.text() == "hearth_up 1\n"
    node.health.good = False
    for path in ("/healthz", "/readyz"):
        async with http.get(path) as answer:
            assert (answer.status, (await answer.json())["status"] in ("overdue", "draining")) == (503, True)


@pytest.mark.parametrize(("asked", "limit_s"), [("5", 5.0), ("0.25", 0.25), ("60", 60.0), ("60.000", 60.0), ("07", 7.0)])
async def test_readyz_passes_a_probes_limit_on(http, node, asked, limit_s):
    async with http.get(f"/readyz?probe={asked}") as answer:
        assert answer.status == 200
    node.health.good = False
    async with http.get(f"/m/tiny/readyz?probe={asked}") as answer:
        assert answer.status == 503
    assert node.health.probe_limits_s == [limit_s, limit_s]


@pytest.mark.parametrize("asked", ["", "0", "0.000", "60.001", "61", "-1", "1e1", "soon", "%D9%A3", "5s", "1" * 500])
async def test_readyz_refuses_what_is_no_limit_of_a_probe(http, node, asked):
    async with http.get(f"/readyz?probe={asked}") as answer:
        error = (await answer.json())["error"]
        assert (answer.status, error["param"], error["code"]) == (400, "probe", "invalid_request")
        assert error["message"].startswith("probe: ")
    assert node.health.probe_limits_s == []


async def params_of(http, node, path="/v1/chat/completions", **fields) -> SamplingParams:
    node.requests.submitted.clear()
    body = {"model": "tiny"} | ({"messages": MESSAGES} if "chat" in path else {"prompt": "hello"}) | fields
    async with http.post(path, json=body) as answer:
        assert answer.status == 200, await answer.text()
    return node.requests.submitted[0].params


async def test_defaults_without_settings(http, node):
    params = await params_of(http, node)
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens) == (1.0, 1.0, 0, 4096 - 5)
    assert params.seed != (await params_of(http, node)).seed
    assert (await params_of(http, node, "/v1/completions")).max_tokens == 16
    assert (await params_of(http, node, "/v1/completions", prompt="x" * 4090)).max_tokens == 6


async def test_the_models_defaults_apply_where_a_request_names_none(http, node):
    node.models[0].generation_defaults = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "max_tokens": 100}
    params = await params_of(http, node)
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens) == (0.6, 0.9, 20, 100)
    params = await params_of(http, node, temperature=0, top_p=1, top_k=-1, max_tokens=7)
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens) == (0, 1, 0, 7)
    params = await params_of(http, node, temperature=0.7, top_p=0)  # in OpenAI's range: the likeliest token
    assert (params.temperature, params.top_p) == (0, 1)
    params = await params_of(http, node, max_tokens=7, max_completion_tokens=8)
    assert params.max_tokens == 8


async def test_sampling_fields_arrive(http, node):
    params = await params_of(
        http, node, seed=-(2**63), min_tokens=2, ignore_eos=True, stop_token_ids=[7, VOCAB - 1], temperature=1, priority=-3
    )
    assert (params.seed, params.min_tokens, params.ignore_eos, params.stop_token_ids) == (-(2**63), 2, True, [7, VOCAB - 1])
    assert node.requests.submitted[0].priority == -3


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [("ab", [[97, 98]]), (["ab", "c"], [[97, 98], [99]]), ([1, 2], [[1, 2]]), ([[1], [2, 3]], [[1], [2, 3]])],
)
async def test_prompts_of_every_form(http, node, prompt, prompts):
    await params_of(http, node, "/v1/completions", prompt=prompt)
    assert [generation.prompt for generation in node.requests.submitted] == prompts


async def test_message_forms_of_real_clients(http, node):
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "developer", "content": "a"},
        {"role": "user", "content": [{"type": "text", "text": "b"}, {"type": "text", "text": "c"}], "name": "me"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "d", "tool_call_id": "c"},
        {"role": "assistant", "content": "e", "refusal": None, "no_such_field": 1},
    ]
    await params_of(http, node, messages=messages)
    assert bytes(node.requests.submitted[0].prompt) == b"ab\ncde"


async def test_a_prompt_without_tokens_begins_with_bos_where_there_is_one(http, node):
    async with http.post("/v1/completions", json={"model": "tiny", "prompt": ""}) as answer:
        assert answer.status == 400
    node.models[0].bos_token_id = 11
    await params_of(http, node, "/v1/completions", prompt="")
    assert node.requests.submitted[0].prompt == [11]


async def test_a_batch_is_accepted_whole_or_not_at_all(http, node):
    from daemon.errors import NotNow

    submit = node.requests.submit

    def second_refused(generation):
        if len(node.requests.submitted) == 1:
            raise NotNow("queue_full", "full", status=429, retry_after_s=1)
        submit(generation)

    node.requests.submit = second_refused
    for stream in (True, False):
        node.requests.submitted.clear()
        node.requests.cancelled.clear()
        async with http.post("/v1/completions", json={"model": "tiny", "prompt": ["a", "b"], "stream": stream}) as answer:
            assert answer.status == 429
        assert len(node.requests.cancelled) >= 1


async def test_large_bodies_are_parsed_beside_the_loop(http, node):
    node.models[0].max_model_len = 1 << 22
    await params_of(http, node, messages=[{"role": "user", "content": "x" * INLINE_BYTES}], max_tokens=1)
    assert len(node.requests.submitted[0].prompt) == INLINE_BYTES
    assert node.text.num_parsed == 1
    async with http.post("/v1/completions", json={"model": "tiny", "prompt": [1] * (INLINE_BYTES // 3 + 1), "n": 0}) as answer:
        assert (answer.status, (await answer.json())["error"]["param"]) == (400, "n")


async def test_the_end_token_is_counted_but_not_shown(http, node):
    node.requests.script = lambda _: [([97], 0), ([98], 1)]  # 98 as the request's own stop token
    async with http.post("/v1/completions", json={"model": "tiny", "prompt": "x", "stop_token_ids": [98]}) as answer:
        body = await answer.json()
    assert (body["choices"][0]["text"], body["usage"]["completion_tokens"]) == ("a", 2)
    node.requests.script = lambda _: text_script(b"ab")
    async with http.post("/v1/completions", json={"model": "tiny", "prompt": "x"}) as answer:
        body = await answer.json()
    assert (body["choices"][0]["text"], body["usage"]["completion_tokens"]) == ("ab", 3)
    assert EOS in node.requests.submitted[-1].output


async def test_cached_tokens_are_told(http, node):
    def script(generation):
        generation.num_cached = 4
        return text_script(b"x")

    node.requests.script = script
    for stream in (False, True):
        body = {"model": "tiny", "messages": MESSAGES, "stream": stream} | (
            {"stream_options": {"include_usage": True}} if stream else {}
        )
        async with http.post("/v1/chat/completions", json=body) as answer:
            assert '"cached_tokens":4' in await answer.text()


async def test_content_types_of_careless_clients(http):
    body = json.dumps({"model": "tiny", "messages": MESSAGES})
    for headers in ({"Content-Type": "application/json; charset=utf-8"}, {"Content-Type": "application/vnd.api+json"}):
        async with http.post("/v1/chat/completions", data=body, headers=headers) as answer:
            assert answer.status == 200
    async with http.post("/v1/chat/completions", data=body, skip_auto_headers=["Content-Type"]) as answer:
        assert answer.status == 200
