"""What a mixture's experts are said to have computed, by `hearth experts` and /metrics, is what transformers' router chose."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from tests.daemon.test_metrics import samples
from tests.e2e.checkpoints import make_model
from tests.e2e.node import Node, without_drafts
from tests.engine.test_expert_counts import chosen_by

SIZES = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
NUM_LAYERS = 2
PAIRS = SIZES["num_experts_per_tok"] * NUM_LAYERS  # of each token
PROMPTS = [np.random.default_rng(seed).integers(97, 123, 30 + seed).tolist() for seed in range(3)]


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """`whole` and `split` are the same mixture, of which each device has two of the four experts in `split`."""
    folder = tmp_path_factory.mktemp("experts")
    for name in ("whole", "split"):
        mixture = {"architecture": "Qwen2MoeForCausalLM", "model_type": "qwen2_moe", **SIZES}
        make_model(folder / "models" / name, num_layers=NUM_LAYERS, max_position_embeddings=1024, **mixture)
    make_model(folder / "models" / "dense")
    config = without_drafts("whole", "split", "dense")
    config = config.replace('[models."whole"]\n', '[models."whole"]\ndevices = ["cpu:0"]\n')
    config = config.replace('[models."split"]\n', '[models."split"]\nparallel = { expert = 2 }\n')
    flags = ["--dtype", "float32", "--threads", "1"]
    with Node(folder, devices=["cpu:0=48MiB", "cpu:1=48MiB"], runner="torch", config=config, flags=flags) as running:
        yield running


def ask(node: Node, model: str, prompt: list[int], num_tokens: int) -> None:
    with node.openai() as client:
        client.completions.create(model=model, prompt=prompt, max_tokens=num_tokens, extra_body={"ignore_eos": True})


def told(node: Node, model: str, num_tokens: int) -> dict[str, Any]:
    """Returns what `hearth experts` says once all is told of num_tokens tokens."""
    node.wait_for(lambda: node.json("experts", model)["tokens"] >= num_tokens * PAIRS, f"{num_tokens} tokens")
    said: dict[str, Any] = node.json("experts", model)
    assert said["tokens"] == num_tokens * PAIRS
    return said


@pytest.fixture(scope="module")
def wanted(node: Node) -> dict[int, list[int]]:
    import transformers

    whole = transformers.AutoModelForCausalLM.from_pretrained(node.models / "whole", dtype=torch.float32)
    return chosen_by(whole, *PROMPTS)


@pytest.mark.parametrize("model", ["whole", "split"])
def test_counts_are_what_the_router_chose(node: Node, wanted: dict[int, list[int]], model: str) -> None:
    """And tokens of the answer count as those of the prompt: all but the last are computed, which was sampled only."""
    assert "no token has passed through the experts" in node.cli("experts", model).stdout
    for prompt in PROMPTS:
        ask(node, model, prompt, 1)
    num_tokens = sum(map(len, PROMPTS))
    said = told(node, model, num_tokens)
    assert {row["layer"]: row["counts"] for row in said["layers"]} == wanted
    assert said["num_experts"] == 4
    of_device = {"cpu:0": num_tokens * PAIRS}
    if model == "split":
        halves = np.array(list(wanted.values())).reshape(NUM_LAYERS, 2, 2).sum((0, 2)).tolist()
        of_device = {"cpu:0": halves[0], "cpu:1": halves[1]}
        assert all(f"{tokens}  " in node.cli("experts", model).stdout for tokens in halves)
    assert said["devices"] == of_device
    page = samples(node.get("/metrics")[1])
    for device, tokens in of_device.items():
        assert page["hearth_expert_tokens_total", (("device", device), ("model", model))] == tokens
    most, mean = (sum(of(counts) for counts in wanted.values()) for of in (max, np.mean))
    assert page["hearth_expert_imbalance", (("model", model),)] == pytest.approx(most / mean, abs=1e-4)
    ask(node, model, [120] * 20, 40)
    told(node, model, num_tokens + 20 + 39)


def test_nothing_is_lost_when_a_model_or_its_engine_leaves(node: Node) -> None:
    before = node.json("experts", "whole")["tokens"] // PAIRS
    ask(node, "whole", [110] * 25, 1)
    assert node.cli("unload", "whole").returncode == 0
    assert node.json("experts", "whole")["tokens"] == (before + 25) * PAIRS, "the rest was told before the model left"
    ask(node, "whole", [111] * 25, 1)
    told(node, "whole", before + 50)
    pid = next(int(device["pid"]) for device in node.json("status")["devices"] if device["name"] == "cpu:0")
    os.kill(pid, signal.SIGKILL)
    ask(node, "whole", [112] * 25, 1)
    told(node, "whole", before + 75)


def test_a_model_without_experts(node: Node) -> None:
    refused = node.cli("experts", "dense")
    assert refused.returncode == 2
    assert refused.stderr == "hearth: Model 'dense' has no experts: every token passes through all of it.\n"
    assert node.cli("experts", "nobody").returncode == 3
