"""prompt_logprobs in vLLM's shape, and what is refused by name; a fake engine tells the numbers."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest

from daemon.api.generation import prompt_logprobs
from daemon.api.generation.prompt_logprobs import MAX_NUMBERS
from daemon.errors import BadRequest
from daemon.streams.prompt_trail import PromptTrail
from engine.protocol import PromptLogprobs
from tests.daemon.api.fakes import VOCAB, entry, logprobs_of, serve

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
BODIES = {
    CHAT: {"model": "tiny", "messages": [{"role": "user", "content": "abé"}]},
    TEXT: {"model": "tiny", "prompt": "abé"},
}
IDS = list("abé".encode())
EOS, ACUTE = 256, 259


@pytest.fixture
async def node():
    async with serve() as node:
        yield node


async def ask(http, path, **more):
    async with http.post(path, json={**BODIES[path], "max_tokens": 2, **more}) as answer:
        body = await answer.json()
        return answer.status, body


def told(body, path):
    assert ("prompt_logprobs" in body) == (path == CHAT)
    return body["prompt_logprobs"] if path == CHAT else body["choices"][0]["prompt_logprobs"]


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("num_top", [0, 1, 3])
async def test_the_shape(node, http, path, num_top):
    status, body = await ask(http, path, prompt_logprobs=num_top)
    assert status == 200, body
    first, *others = told(body, path)
    assert first is None
    assert len(others) == len(IDS) - 1
    for token_id, tokens in zip(IDS[1:], others, strict=True):
        value = logprobs_of(token_id, 0)[0]
        names = [chr(each) if each < 128 else "\ufffd" for each in range(token_id, token_id + max(1, num_top))]
        # the fake's own token is always the likeliest, whatever rank it tells
        rank = 1 if num_top else 1 + (IDS.index(token_id) - 1) % 3
        wanted = {str(token_id): {"logprob": pytest.approx(value), "rank": rank, "decoded_token": names[0]}}
        for at in range(1, num_top):
            wanted[str(token_id + at)] = {"logprob": pytest.approx(value - at), "rank": at + 1, "decoded_token": names[at]}
        assert tokens == wanted
        assert next(iter(tokens)) == str(token_id), "the prompt's own comes first"
    params = node.requests.submitted[0].params
    assert (params.prompt_logprobs, params.prompt_ranks, params.logprobs) == (num_top, True, -1)
    assert all(choice.get("logprobs") is None for choice in body["choices"])


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_without_it_nothing_is_said(node, http, path):
    for more in ({}, {"prompt_logprobs": None}):
        status, body = await ask(http, path, **more)
        assert status == 200
        assert "prompt_logprobs" not in body
        assert "prompt_logprobs" not in body["choices"][0]
        assert node.requests.submitted[-1].params.prompt_logprobs == -1


async def test_a_token_that_is_none_of_the_likeliest_is_told_beside_them_with_its_rank(node, http):
    def fed(generation):
        trail = generation.prompt_logprobs
        trail.feed(PromptLogprobs(1, 1, 2, [-5.0], [EOS, ACUTE], [-0.5, -1.5], [17]))
        return [([97], 2)]

    node.requests.script = fed
    _, body = await ask(http, TEXT, prompt=[98, 99], prompt_logprobs=2)
    assert told(body, TEXT) == [
        None,
        {
            "99": {"logprob": -5.0, "rank": 17, "decoded_token": "c"},
            "256": {"logprob": -0.5, "rank": 1, "decoded_token": "<eos>"},
            "259": {"logprob": -1.5, "rank": 2, "decoded_token": "é"},
        },
    ]


async def test_of_several_choices_and_prompts(node, http):
    """The numbers of a prompt are computed for its first choice and told with each."""
    status, body = await ask(http, TEXT, prompt=["abc", "de"], n=2, prompt_logprobs=1, logprobs=0)
    assert status == 200, body
    assert [generation.params.prompt_logprobs for generation in node.requests.submitted] == [1, -1, 1, -1]
    assert [generation.params.prompt_ranks for generation in node.requests.submitted] == [True, False, True, False]
    firsts = [[next(iter(each)) for each in choice["prompt_logprobs"][1:]] for choice in body["choices"]]
    assert firsts == [["98", "99"], ["98", "99"], ["101"], ["101"]]
    status, body = await ask(http, CHAT, n=3, prompt_logprobs=0)
    assert [generation.params.prompt_logprobs for generation in node.requests.submitted[4:]] == [0, -1, -1]
    assert len(told(body, CHAT)) == len(IDS)
    assert all("prompt_logprobs" not in choice for choice in body["choices"])


async def test_a_prompt_of_one_token_has_null_alone(http):
    _, body = await ask(http, TEXT, prompt=[97], prompt_logprobs=2)
    assert told(body, TEXT) == [None]


@pytest.mark.parametrize(("logprobs", "prompt"), [(1, 3), (3, 1), (0, 2)])
async def test_beside_an_echo_that_wants_another_number(node, http, logprobs, prompt):
    _, body = await ask(http, TEXT, prompt=[97, 98], echo=True, logprobs=logprobs, prompt_logprobs=prompt, n=2)
    most = max(logprobs, prompt)
    assert [generation.params.prompt_logprobs for generation in node.requests.submitted] == [most, logprobs]
    for choice in body["choices"]:
        shown = choice["logprobs"]["top_logprobs"]
        assert shown is None if logprobs == 0 else len(shown[1]) == logprobs
        assert len(choice["prompt_logprobs"][1]) == prompt


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("value", [-1, 21, "1", True, False, [1], 1.5])
async def test_bad_values_are_refused_by_name(node, http, path, value):
    status, body = await ask(http, path, prompt_logprobs=value)
    assert (status, body["error"]["param"]) == (400, "prompt_logprobs"), body
    assert not node.requests.submitted


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("value", [0, 5])
async def test_streams_have_none(node, http, path, value):
    status, body = await ask(http, path, prompt_logprobs=value, stream=True)
    assert (status, body["error"]["param"], body["error"]["code"]) == (400, "prompt_logprobs", "unsupported_parameter")
    assert "stream" in body["error"]["message"]
    assert not node.requests.submitted
    async with http.post(path, json={**BODIES[path], "prompt_logprobs": None, "stream": True}) as answer:
        assert answer.status == 200


async def test_an_answer_that_memory_could_not_hold_is_refused_with_the_arithmetic():
    most = MAX_NUMBERS // (21 * 4)
    assert 20_000 < most < 30_000
    async with serve(models=[entry(max_model_len=1 << 20)]) as node, aiohttp.ClientSession(node.url) as http:
        body = {"model": "tiny", "prompt": [97] * (most + 1), "n": 4, "prompt_logprobs": 20, "max_tokens": 1}
        async with http.post(TEXT, json=body) as answer:
            error = (await answer.json())["error"]
        assert (answer.status, error["param"]) == (400, "prompt_logprobs")
        assert (
            f"{most + 1} prompt tokens with 20 alternatives each, for each of 4 choices, make {(most + 1) * 84}" in error["message"]
        )
        assert not node.requests.submitted
        for less in ({"n": 3}, {"prompt_logprobs": 14}, {"prompt_logprobs": None}):
            node.requests.refusal = BadRequest("model_unusable", "far enough")
            async with http.post(TEXT, json={**body, **less}) as answer:
                assert (await answer.json())["error"]["code"] == "model_unusable"


async def test_of_a_long_prompt_the_loop_has_its_turn_in_between(http, monkeypatch):
    turns = []
    sleep = asyncio.sleep

    async def counted(delay_s):
        turns.append(delay_s)
        await sleep(delay_s)

    answers = []
    for numbers in (100, 1 << 30):
        monkeypatch.setattr(prompt_logprobs, "RENDERED_AT_ONCE", numbers)
        monkeypatch.setattr(prompt_logprobs.asyncio, "sleep", counted)
        turns.clear()
        _, body = await ask(http, TEXT, prompt=[at % VOCAB for at in range(1200)], prompt_logprobs=1, max_tokens=1)
        monkeypatch.setattr(prompt_logprobs.asyncio, "sleep", sleep)
        answers.append(told(body, TEXT))
        pieces = turns.count(0)
        assert pieces >= 1199 // 51 if numbers == 100 else pieces < 10
    assert answers[0] == answers[1]
    assert len(answers[0]) == 1200


def test_what_is_told_again_takes_the_place_of_what_was_told() -> None:
    trail = PromptTrail(1)
    trail.feed(PromptLogprobs(1, 1, 2, [-1.0, -2.0, -3.0], [1, 2, 3, 4, 5, 6], [-1.0] * 6, [1, 2, 3]))
    again = PromptLogprobs(1, 1, 2, [-1.5, -2.5], [7, 8, 9, 10], [-2.0] * 4, [4, 5])
    trail.feed(again)
    trail.feed(PromptLogprobs(1, 3, 2, [-3.5], [11, 12], [-2.0] * 2, [6]))
    assert list(trail.tokens()) == [(-1.5, 4, [7], [-2.0]), (-2.5, 5, [9], [-2.0]), (-3.5, 6, [11], [-2.0])]
    with pytest.raises(RuntimeError, match="from 4 to 5"):
        trail.feed(PromptLogprobs(1, 5, 2, [-3.5], [11, 12], [-2.0] * 2, [6]))
