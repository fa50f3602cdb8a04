"""Drafted tokens behind the daemon: the same texts, in fewer steps, and the operator sees how many were guessed right."""

from __future__ import annotations

import os
import re
import shutil
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from tests.e2e.chat import Stream
from tests.e2e.checkpoints import make_head, make_model
from tests.e2e.node import Node, without_drafts

REQUESTS: list[dict[str, Any]] = [
    {"prompt": "one two three one two three one", "temperature": 0, "max_tokens": 120},
    {"prompt": "one two three", "temperature": 0, "max_tokens": 120, "logprobs": 1},
    {"prompt": "a b a b a b a", "temperature": 0.3, "seed": 5, "max_tokens": 90},
    {"prompt": "a b a b a b a", "temperature": 0, "max_tokens": 90, "frequency_penalty": 0.4},
    {"prompt": "x y z x y z", "temperature": 0, "max_tokens": 90, "stop": ["e"]},
    {"prompt": "a b", "temperature": 1.5, "seed": 2, "max_tokens": 150, "logit_bias": {"70": 13, "71": 11}},  # repeats itself
    {"prompt": "x y z x y z", "temperature": 0.2, "seed": 1, "max_tokens": 60, "n": 3},
    {
        "prompt": "a b",
        "temperature": 0.9,
        "seed": 4,
        "max_tokens": 90,
        "logprobs": 2,
        "extra_body": {"allowed_token_ids": [70, 71]},
    },
]

SCHEMA = {"type": "object", "properties": {"temperature": {"enum": ["cold", "hot"]}}, "required": ["temperature"]}
STRUCTURED: list[dict[str, Any]] = [
    {"prompt": "a b a b", "seed": 3, "max_tokens": 90, "logprobs": 1, "extra_body": {"guided_json": SCHEMA}},
    {"prompt": "a b a b", "temperature": 0, "max_tokens": 60, "extra_body": {"regex": "(one two three ){2,9}end"}},
]


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """Two models without drafts, and copies of them: `m` and `headed` of `plain`, `predicting` of `mixture`, which has a predictor
    that knows it by heart."""
    folder = tmp_path_factory.mktemp("drafts")
    models = folder / "models"
    make_model(models / "plain", max_position_embeddings=512)
    sizes = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1}
    family: dict[str, Any] = {"architecture": "Glm4MoeForCausalLM", "model_type": "glm4_moe", **sizes}
    make_model(models / "mixture", agreeing_predictor=True, max_position_embeddings=512, **family)
    for name, copy in (("plain", "m"), ("plain", "headed"), ("mixture", "predicting")):
        shutil.copytree(models / name, models / copy)
    make_head(models / "headed" / "head", models / "headed")
    config = without_drafts("plain", "mixture")
    with Node(folder, devices=["cpu=128MiB"], runner="torch", config=config, flags=["--dtype", "float32"]) as running:
        yield running


def answers(node: Node, model: str, requests: list[dict[str, Any]]) -> list[Any]:
    def ask(body: dict[str, Any]) -> Any:
        told = node.openai().completions.create(model=model, **body)
        texts = [(choice.text, choice.finish_reason) for choice in told.choices]
        tokens = [choice.logprobs.tokens for choice in told.choices if choice.logprobs is not None]
        return texts, tokens, told.usage.completion_tokens

    with ThreadPoolExecutor(len(requests)) as pool:
        return list(pool.map(ask, requests))


def drafted(node: Node, model: str) -> dict[str, int]:
    page = node.get("/metrics")[1]
    rows = re.findall(rf'^hearth_(drafted|accepted|generated)_tokens_total{{model="{model}"}} (\d+)\.0$', page, re.MULTILINE)
    return {kind: int(value) for kind, value in rows}


def test_texts_are_those_of_a_model_without_drafts(node: Node) -> None:
    expected = answers(node, "plain", REQUESTS)

    def same_with_drafts() -> bool:
        assert answers(node, "m", REQUESTS) == expected
        return drafted(node, "m").get("accepted", 0) > 0

    # where other work makes steps of more rows look dear, nothing is drafted until their costs are learned anew
    node.wait_for(same_with_drafts, "drafted tokens that hold")
    told = drafted(node, "m")
    assert told["accepted"] <= told["drafted"]
    assert told["generated"] % drafted(node, "plain")["generated"] == 0
    assert drafted(node, "plain").keys() == {"generated"}
    rows = {row["name"]: row for row in node.ps()}
    assert (rows["m"]["drafted_tokens"], rows["m"]["accepted_tokens"]) == (told["drafted"], told["accepted"])
    assert "drafted_tokens" not in rows["plain"]
    shown = {line.split()[0]: line for line in node.cli("ps").stdout.splitlines() if line}
    assert shown["NAME"].endswith("ACCEPTED")
    assert shown["m"].endswith(f" {100 * told['accepted'] / told['drafted']:.0f} %")
    assert not shown["plain"].endswith("%")
    letters = {str(ord(letter)): 30 for letter in "ABCDEFGHIJKLMNOPQRSTUVWXYZ"}  # each of them is a token
    chat: dict[str, Any] = {"messages": [{"role": "user", "content": "one two"}], "temperature": 0, "max_tokens": 80}
    chat["logit_bias"] = letters
    reply = node.openai().chat.completions.create(model="plain", **chat)
    assert reply.usage.completion_tokens_details is None
    chat["prediction"] = {"type": "content", "content": [{"type": "text", "text": reply.choices[0].message.content}]}

    def predicted() -> bool:
        again = node.openai().chat.completions.create(model="m", **chat)
        assert again.choices[0].message == reply.choices[0].message
        details = again.usage.completion_tokens_details
        assert details.rejected_prediction_tokens >= 0
        return bool(details.accepted_prediction_tokens > 30)

    node.wait_for(predicted, "a prediction that holds")

    def forced() -> bool:  # with and without guesses what a grammar forces is drafted
        before = drafted(node, "plain").get("accepted", 0)
        assert answers(node, "m", STRUCTURED) == answers(node, "plain", STRUCTURED)
        return drafted(node, "plain").get("accepted", 0) > before

    node.wait_for(forced, "drafts that a grammar forces")
    chat["prediction"]["content"][0] = {"type": "image_url"}
    with pytest.raises(openai.BadRequestError, match=r"prediction.content\[0\].type: '\w+' is not supported, only text"):
        node.openai().chat.completions.create(model="m", **chat)


def test_a_checkpoints_own_predictor_drafts(node: Node) -> None:
    """Here it knows the model by heart; for so small a one it may be found too slow, and then prompt lookup drafts. Neither its
    engine's end under a stream nor an eviction shows in a text."""
    expected = answers(node, "mixture", REQUESTS)

    def same_with_drafts() -> bool:
        assert answers(node, "predicting", REQUESTS) == expected
        return drafted(node, "predicting").get("accepted", 0) > 100

    node.wait_for(same_with_drafts, "drafted tokens that hold")
    assert "predicting: float32, drafts by its own predictor, max_model_len" in node.log_text()

    whole = Stream(node, "mixture", "once upon a time", 400).join().text
    killed = Stream(node, "predicting", "once upon a time", 400)
    killed.wait_for_chunks(3)
    (engine,) = node.engine_pids()
    os.kill(engine, signal.SIGKILL)
    assert killed.join().text == whole
    told = drafted(node, "predicting")
    assert killed.error == ""
    assert node.cli("evict", "predicting").returncode == 0

    def same_with_drafts_again() -> bool:
        again = Stream(node, "predicting", "once upon a time", 400).join()
        assert (again.text, again.error) == (whole, "")
        return drafted(node, "predicting")["accepted"] > told["accepted"]

    # as above: the new engine learns what steps cost while other work makes them look dear
    node.wait_for(same_with_drafts_again, "drafted tokens that hold, of the model that came back")


def test_a_head_beside_a_model_drafts_for_it(node: Node) -> None:
    """One of random weights is hardly ever right, which changes no text, and is soon left alone."""
    expected = answers(node, "plain", REQUESTS)
    assert answers(node, "headed", REQUESTS) == expected
    assert drafted(node, "headed")["drafted"] > 0
    assert "headed: float32, drafts by headed/head, max_model_len" in node.log_text()
    assert "it drafts tokens for headed" in node.cli("why", "headed/head").stdout
    os.kill(node.engine_pids()[0], signal.SIGKILL)
    assert answers(node, "headed", REQUESTS) == expected
