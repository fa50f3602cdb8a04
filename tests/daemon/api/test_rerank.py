"""/v1/rerank and /v1/score over a real server, with an engine that scores a pair by the length of its document."""

from __future__ import annotations

import json
import math
from array import array
from typing import Any

import aiohttp
import pytest

from daemon.access.tenant import Limits
from daemon.api.endpoints.embeddings import AT_ONCE
from daemon.contracts import Generation
from daemon.errors import NotNow
from engine.protocol import FINISH_STOP
from tests.daemon.api import test_limits
from tests.daemon.api.fakes import Script, entry, serve
from tests.daemon.api.openai_error import check_error

MODELS = [
    entry("org/rank", aliases=("rank",), scoring="sigmoid", max_model_len=12),
    entry("org/raw", aliases=("raw",), scoring="identity"),
    entry("org/enc", aliases=("enc",), embedding_size=4),
    entry(),
]
RERANK = {"model": "rank", "query": "why", "documents": ["a", "abcd", {"text": "ab", "title": "not read"}, ""]}
SCORES = (1 - 3.0, 4 - 3.0, 2 - 3.0, 0 - 3.0)


def by_length(generation: Generation) -> Script:
    length = len(generation.prompt) - generation.second_at
    generation.vector, generation.submitted_s = array("f", [length - 3.0]).tobytes(), 1.0
    return [([], FINISH_STOP)]


def sigmoid(score: float) -> float:
    return 1 / (1 + math.exp(-score))


async def post(http: aiohttp.ClientSession, path: str, body: dict[str, Any], status: int = 200) -> Any:
    async with http.post(path, json=body) as answer:
        text = await answer.text()
        assert answer.status == status, text
        return json.loads(text)


@pytest.fixture
async def node():
    async with serve(by_length, models=MODELS) as node:
        yield node


@pytest.fixture
async def http(node):
    async with aiohttp.ClientSession(node.url, headers={"X-Request-Id": "7"}) as http:
        yield http


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank", "/v2/rerank", "/m/rank/v1/rerank"])
async def test_documents_are_told_by_their_relevance(node, http, path: str) -> None:
    told = await post(http, path, RERANK)
    assert (told["id"], told["model"]) == ("rerank-7", "org/rank")
    assert told["usage"] == {"prompt_tokens": 4 * 4 + 7, "total_tokens": 4 * 4 + 7}
    assert [each["index"] for each in told["results"]] == [1, 2, 0, 3]
    assert [each["document"] for each in told["results"]] == [{"text": text} for text in ("abcd", "ab", "a", "")]
    assert [each["relevance_score"] for each in told["results"]] == [pytest.approx(sigmoid(SCORES[at])) for at in (1, 2, 0, 3)]
    first = node.requests.submitted[0]
    assert (first.task, first.second_at, bytes(first.prompt), first.public_id) == ("score", 4, b"why\0a", "rerank-7")
    assert [each.first for each in node.requests.submitted] == [None, first, first, first]


async def test_what_is_told_of_the_best(http) -> None:
    told = await post(http, "/v1/rerank", RERANK | {"top_n": 2, "return_documents": False})
    assert [list(each) for each in told["results"]] == [["index", "relevance_score"]] * 2
    assert [each["index"] for each in told["results"]] == [1, 2]
    assert len((await post(http, "/v1/rerank", RERANK | {"top_n": 0}))["results"]) == 4
    assert len((await post(http, "/v1/rerank", RERANK | {"top_n": 9}))["results"]) == 4
    alike = await post(http, "/v1/rerank", RERANK | {"documents": ["xy", "abc", "abd"], "query": {"text": "q"}})
    assert [each["index"] for each in alike["results"]] == [1, 2, 0], "of equal ones the first comes first"


async def test_a_checkpoint_may_ask_for_the_scores_themselves(http) -> None:
    told = await post(http, "/v1/rerank", RERANK | {"model": "raw"})
    assert [each["relevance_score"] for each in told["results"]] == [1.0, -1.0, -2.0, -3.0]


async def test_cut_documents(node, http) -> None:
    body = RERANK | {"documents": ["abcdefghijkl", "ab"]}
    check_error(400, json.dumps(await post(http, "/v1/rerank", body, 400)), "documents[0]")
    await post(http, "/v1/rerank", body | {"max_tokens_per_doc": 3})
    assert [bytes(each.prompt) for each in node.requests.submitted] == [b"why\0abc", b"why\0ab"]
    await post(http, "/v1/rerank", body | {"truncate_prompt_tokens": 6})
    await post(http, "/v1/rerank", body | {"truncate_prompt_tokens": -1})
    assert [len(each.prompt) for each in node.requests.submitted] == [7, 6, 6, 6, 12, 6]


async def test_many_documents_wait_in_pieces(node, http) -> None:
    most = 0

    def script(generation: Generation) -> Script:
        nonlocal most
        waiting = [each for each in node.requests.submitted if not each.vector]
        most = max(most, len(waiting))
        return by_length(generation)

    node.requests.script = script
    told = await post(http, "/v1/rerank", RERANK | {"documents": ["x" * (at % 7) for at in range(300)], "top_n": 3})
    assert [each["index"] for each in told["results"]] == [6, 13, 20]
    assert most == AT_ONCE
    assert len(node.requests.submitted) == 300


async def test_long_bodies_are_read_by_a_text_worker(node, http) -> None:
    documents = ["ab" * 40_000, "abcd", "x" * 90_000]
    told = await post(http, "/v1/rerank", RERANK | {"documents": documents, "max_tokens_per_doc": 2, "top_n": 1})
    assert told["results"][0]["document"]["text"] == documents[0]
    await post(http, "/v1/score", {"model": "rank", "text_1": "a", "text_2": documents, "truncate_prompt_tokens": 9})
    assert node.text.num_parsed == 2


async def test_a_refusal_takes_all_documents_back(node, http) -> None:
    node.requests.script = lambda generation: [NotNow("queue_full", "full")] if len(generation.prompt) == 6 else [60.0]
    assert (await post(http, "/v1/rerank", RERANK, 503))["error"]["code"] == "queue_full"
    assert len(node.requests.cancelled) == 4


@pytest.mark.parametrize(
    ("changes", "param", "told"),
    [
        ({"query": None}, "query", ""),
        ({"query": "a\0b"}, "query", "NUL"),
        ({"documents": []}, "documents", "documents is empty"),
        ({"documents": "a"}, "documents", ""),
        ({"documents": ["a", 5]}, "documents[1]", ""),
        ({"documents": ["a", {"title": "b"}]}, "documents[1].text", "missing"),
        ({"documents": ["a", "b\0"]}, "documents[1]", "NUL"),
        ({"documents": ["a"] * 2049}, "documents", "2049 are more than the 2048"),
        ({"top_n": -1}, "top_n", ""),
        ({"return_documents": "yes"}, "return_documents", ""),
        ({"max_tokens_per_doc": 0}, "max_tokens_per_doc", ""),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", ""),
        ({"truncate_prompt_tokens": 13}, "truncate_prompt_tokens", "13 is more than max_model_len 12 of org/rank"),
        ({"rank_fields": ["title"]}, "rank_fields", "not supported"),
        ({"activation": False}, "activation", "not supported"),
        ({"model": "tiny"}, "model", "org/tiny generates text; it scores no documents"),
        ({"model": "enc"}, "model", "org/enc makes embeddings; it scores no documents"),
    ],
)
async def test_refusals_name_the_field(node, http, changes: dict[str, Any], param: str, told: str) -> None:
    error = check_error(400, json.dumps(await post(http, "/v1/rerank", RERANK | changes, 400)), param)
    assert told in str(error["message"])
    assert not node.requests.submitted


async def test_a_cross_encoder_does_nothing_else(http) -> None:
    told = "org/rank is a cross-encoder: it scores documents for a query"
    for path, body in (
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
        ("/v1/completions", {"prompt": "hi"}),
        ("/v1/embeddings", {"input": "hi"}),
        ("/v1/responses", {"input": "hi"}),
    ):
        error = check_error(400, json.dumps(await post(http, path, {"model": "rank", **body}, 400)), "model")
        assert (error["code"], told in str(error["message"])) == ("wrong_task", True)
    for texts in ("hi", []):
        assert told in (await post(http, "/api/embed", {"model": "rank", "input": texts}, 400))["error"]
    assert told in (await post(http, "/api/generate", {"model": "rank"}, 400))["error"]
    shown = await post(http, "/api/show", {"model": "rank"})
    assert shown["capabilities"] == []


async def test_scores_in_the_order_of_the_texts(node, http) -> None:
    for path in ("/v1/score", "/score"):
        told = await post(http, path, {"model": "raw", "text_1": "why", "text_2": ["a", "abcd"]})
        assert told["data"] == [{"index": at, "object": "score", "score": score} for at, score in enumerate((-2.0, 1.0))]
        assert (told["id"], told["object"], told["model"]) == ("score-7", "list", "org/raw")
        assert told["usage"] == {"prompt_tokens": 13, "total_tokens": 13}
        assert told["created"] > 1.7e9
    told = await post(http, "/score", {"model": "raw", "queries": ["x", "yz"], "documents": ["a", "ab"]})
    assert [bytes(each.prompt) for each in node.requests.submitted[-2:]] == [b"x\0a", b"yz\0ab"]
    assert [each["score"] for each in told["data"]] == [-2.0, -1.0]
    told = await post(http, "/score", {"model": "rank", "text_1": ["x"], "text_2": "abc"})
    assert [each["score"] for each in told["data"]] == [0.5]


@pytest.mark.parametrize(
    ("texts", "param"),
    [
        ({}, "text_1"),
        ({"text_1": "a"}, "text_2"),
        ({"documents": "a"}, "queries"),
        ({"text_1": "a", "documents": "b"}, "documents"),
        ({"text_1": ["a", "b"], "text_2": ["c"]}, "text_2"),
        ({"text_1": "a", "text_2": []}, "text_2"),
        ({"text_1": "a", "text_2": [1]}, "text_2"),
    ],
)
async def test_texts_that_make_no_pairs_are_refused(http, texts: dict[str, Any], param: str) -> None:
    error = check_error(400, json.dumps(await post(http, "/v1/score", {"model": "rank", **texts}, 400)))
    assert str(error["param"]).startswith(param)


@pytest.mark.parametrize(
    ("path", "body"), [("/v1/rerank", RERANK), ("/score", {"text_1": "why", "text_2": ["a", "abcd", "ab", ""]})]
)
async def test_limits_count_pairs(path: str, body: dict[str, Any]) -> None:
    access = test_limits.access(Limits(tokens_per_day=50))
    async with serve(by_length, models=MODELS, access=access) as node, test_limits.client(node.url) as http:
        for status in (200, 200, 429):
            await post(http, path, {**body, "model": "rank"}, status)
        name = "documents" if "documents" in body else "text_2"
        error = await post(http, path, {**body, "model": "rank", name: ["abcdefg"] * 9}, 400)
        assert f"the prompt ({name}) has 99 tokens, 49 more than all of that" in error["error"]["message"]


@pytest.mark.parametrize("score", [0.0, 3.25, -3.25, 88.0, -88.0, 1e30, -1e30])
async def test_relevance_of_any_score(score: float) -> None:
    import torch

    def script(generation: Generation) -> Script:
        generation.vector = array("f", [score]).tobytes()
        return [([], FINISH_STOP)]

    async with serve(script, models=MODELS) as node, aiohttp.ClientSession(node.url) as http:
        told = await post(http, "/score", {"model": "rank", "text_1": "a", "text_2": "b"})
    wanted = torch.sigmoid(torch.tensor(score, dtype=torch.float64)).item()
    assert told["data"][0]["score"] == pytest.approx(wanted, rel=1e-6, abs=1e-300)


async def test_a_model_that_scores_is_expected_while_its_pairs_are_read(http, node) -> None:
    await post(http, "/v1/rerank", RERANK)
    assert node.requests.expected == [("org/rank", "", 1)]
