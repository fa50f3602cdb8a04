"""One daemon with tiny checkpoints in FP8 and INT4 as their producers write them: its API and commands name the format and the bits
that a weight takes, and say that scales of KV in the files are not used.
"""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Iterator
from typing import Any

import openai
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.e2e.checkpoints import make_model
from tests.e2e.node import Node
from tests.loader import fp8, int4
from tests.loader.shards import divide_in_three

SIZES: dict[str, Any] = {"dtype": "bfloat16", "hidden_size": 256, "num_layers": 3}
HELD = {
    "plain": "bfloat16",
    "fp8": "fp8 by block",
    "fp8-kv": "fp8 by matrix",
    "int4": "int4 by 32",
    "int4-zeros": "int4 by 32, zero points",
}
LEVELS = {"plain": "BF16", "fp8": "FP8", "fp8-kv": "FP8", "int4": "INT4", "int4-zeros": "INT4"}
NOTE = "6 scales of keys and values in its files (k_scale, v_scale) are not used: KV is held as kv_cache_dtype says"


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    folder = tmp_path_factory.mktemp("quantised")
    models = folder / "models"
    plain = make_model(models / "plain", seed=5, **SIZES)
    fp8.quantize(plain, models / "fp8", fp8.KINDS["fine-grained"])
    fp8.quantize(plain, models / "fp8-kv", fp8.KINDS["modelopt"])
    tensors = load_file(models / "fp8-kv" / "model.safetensors")
    for layer in range(3):
        tensors |= {f"model.layers.{layer}.self_attn.{name[0]}_proj.{name}": torch.tensor(0.5) for name in ("k_scale", "v_scale")}
    save_file(tensors, models / "fp8-kv" / "model.safetensors")
    int4.quantize(plain, models / "int4", int4.compressed())
    int4.quantize(plain, models / "int4-zeros", int4.compressed({"symmetric": False}))
    divide_in_three(models / "int4-zeros")
    with Node(folder, devices=["cpu=128MiB"], runner="torch", flags=["--threads", "1"]) as running:
        yield running


def rows(node: Node) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in node.json("models")}


def test_commands_name_format_and_bits(node: Node) -> None:
    """All parameters are counted, also embedding and head, which are plain: so the mean is above the matrices' own bits."""
    found = rows(node)
    assert {name: row["held_as"] for name, row in found.items()} == HELD
    bits = {name: row["bits_per_weight"] for name, row in found.items()}
    assert 16 <= bits["plain"] < 17
    assert 16 > bits["fp8"] > 8
    assert bits["fp8"] > bits["int4-zeros"] > bits["int4"] > 4.5
    lines = node.cli("models").stdout.splitlines()
    for name, held in HELD.items():
        (line,) = [line for line in lines if line.startswith(f"{name} ")]
        assert re.search(rf"  {re.escape(held)} +{bits[name]:g}  ", line), line


def test_bits_are_those_of_the_files(node: Node) -> None:
    """What a checkpoint takes in memory is what its tensors take in its files, but for alignment, repeated scales (FP8) and what is
    not read."""
    for name, row in rows(node).items():
        files = [load_file(path) for path in (node.models / name).glob("*.safetensors")]
        tensors = {key: each for file in files for key, each in file.items()}
        stored = sum(each.numel() * each.element_size() for each in tensors.values())
        assert 0.97 * stored < row["weights_bytes"] < 1.1 * stored, name


def test_ollamas_dialect_names_the_type_of_the_weights(node: Node) -> None:
    with urllib.request.urlopen(f"{node.url}/api/tags") as answer:
        found = {one["name"].removesuffix(":latest"): one["details"]["quantization_level"] for one in json.load(answer)["models"]}
    assert found == LEVELS


@pytest.mark.parametrize("model", HELD)
def test_each_is_served(node: Node, client: openai.OpenAI, model: str) -> None:
    answer = client.completions.create(model=model, prompt="Why?", max_tokens=8, temperature=0, extra_body={"ignore_eos": True})
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 8
    (device,) = node.json("status")["devices"]
    assert (device["kernels"], device["problem"]) == (None, ""), "the kernels are there, and in use"


def test_scales_of_kv_are_told_of_wherever_a_model_is(node: Node) -> None:
    """Looks at `hearth models`, at `hearth plan` of both kinds, at the line that registers the model, and at a load's."""
    assert {name: row.get("notes") for name, row in rows(node).items()} == dict.fromkeys(HELD) | {"fp8-kv": [NOTE]}
    assert f"fp8-kv: {NOTE}" in node.cli("models").stdout
    for name in HELD:
        assert node.json("plan", name)["notes"] == ([NOTE] if name == "fp8-kv" else [])
        assert (NOTE in node.cli("plan", name).stdout) == (name == "fp8-kv")
        planned = node.cli("plan", "--config", str(node.models / name))
        assert planned.returncode == 0, planned.stderr
        assert (NOTE in planned.stdout) == (name == "fp8-kv")
    registered = [line for line in node.log_text().splitlines() if "max_model_len" in line and NOTE in line]
    assert [line.split("fp8-kv: ")[1].startswith("bfloat16, fp8 by matrix matrices") for line in registered] == [True]

    def num_told() -> int:
        return sum(line.endswith(f"fp8-kv: {NOTE}") or f"fp8-kv: {NOTE} device=" in line for line in node.log_text().splitlines())

    assert node.cli("unload", "fp8-kv").returncode == 0
    before = num_told()
    assert node.cli("load", "fp8-kv").returncode == 0
    node.wait_for(lambda: num_told() == before + 1, "the load's line")
