"""One daemon with a model of each type of weights: all are served by compiled kernels, and say what float32 says, as far as their
type can tell. `make test-tiers` runs it with features of the processor taken away.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import openai
import pytest

from engine.host.processor import this_processor
from tests.e2e.checkpoints import make_model
from tests.e2e.node import Node

CONFIG = """
[models.int8]
quantize = "int8"

[models.packed]
resident = "packed"
"""
TEXT = "Why is the sky blue? "
# how far log-probabilities with the same weights, rounded, are from float32's in the mean; those of other weights are 3 and more
CLOSE = {"float32": 1e-5, "bfloat16": 0.3, "int8": 0.5, "packed": 0.3}


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    folder = tmp_path_factory.mktemp("weight_types")
    for name in CLOSE:
        make_model(folder / "models" / name, seed=5, dtype="float32" if name == "float32" else "bfloat16", hidden_size=256)
    with Node(folder, devices=["cpu=128MiB"], runner="torch", config=CONFIG, flags=["--threads", "1"]) as running:
        yield running


def logprobs(client: openai.OpenAI, model: str) -> list[float]:
    """Returns those of a prompt of 168 tokens, whose step has as many rows, and of 8 tokens that follow."""
    extra = {"ignore_eos": True, "allowed_token_ids": [ord("a")]}  # the same for all models
    answer = client.completions.create(model=model, prompt=TEXT * 8, max_tokens=8, echo=True, logprobs=1, extra_body=extra)
    assert answer.choices[0].logprobs is not None
    return [each for each in answer.choices[0].logprobs.token_logprobs or [] if each is not None]


@pytest.mark.parametrize("model", CLOSE)
def test_each_type_of_weights_is_served(node: Node, client: openai.OpenAI, model: str) -> None:
    texts = [
        client.completions.create(model=model, prompt=TEXT, max_tokens=24, temperature=0, extra_body={"ignore_eos": True})
        for _ in range(2)
    ]
    assert texts[0].usage is not None
    assert texts[0].usage.completion_tokens == 24
    assert texts[0].choices[0].text == texts[1].choices[0].text
    told, exact = logprobs(client, model), logprobs(client, "float32")
    assert len(told) == len(exact) == 8 * len(TEXT) - 1 + 8
    assert sum(abs(one - other) for one, other in zip(told, exact, strict=True)) / len(exact) < CLOSE[model]
    (device,) = node.json("status")["devices"]
    assert (device["kernels"], device["problem"]) == (None, ""), "the kernels are there, and in use"


def test_each_type_of_weights_takes_its_own_room(node: Node) -> None:
    rows = {row["name"]: row for row in node.json("models")}
    assert {name: row["held_as"] for name, row in rows.items()} == {name: name for name in CLOSE}
    bits = {name: row["bits_per_weight"] for name, row in rows.items()}
    assert bits["float32"] >= 32 > 17 > bits["bfloat16"] >= 16
    assert bits["bfloat16"] > bits["packed"] > bits["int8"]
    (line,) = [line for line in node.cli("models").stdout.splitlines() if line.startswith("packed ")]
    assert re.search(rf"  packed +{bits['packed']:g}  ", line)
    sizes = {name: row["weights_bytes"] for name, row in rows.items()}
    assert sizes["float32"] > 1.9 * sizes["bfloat16"] > 1.5 * 1.9 * sizes["int8"]
    assert sizes["packed"] < 0.75 * sizes["bfloat16"]


def test_packed_weights_say_what_plain_ones_say(node: Node, client: openai.OpenAI) -> None:
    """The same text, before and after they have left memory, and the same log-probabilities of a prompt. With AMX, some products of
    few rows with plain weights are added up in another order."""
    held = ("bfloat16", "packed")
    packed, plain = logprobs(client, "packed"), logprobs(client, "bfloat16")
    if "amx" in this_processor().features:
        assert sum(abs(one - other) for one, other in zip(packed, plain, strict=True)) / len(plain) < 0.05
        return
    assert packed == plain
    texts = {}
    for turn in range(2):
        for model in held:
            answer = client.completions.create(model=model, prompt=TEXT, max_tokens=40, temperature=0)
            texts[model, turn] = answer.choices[0].text
        assert node.cli("unload", "packed").returncode == 0
    assert len(set(texts.values())) == 1
