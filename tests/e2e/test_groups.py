"""A model that is split over two devices, beside models that are not: the same text as on one device, whatever happens to it."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from daemon.cli.table import size
from tests.e2e.chat import Stream
from tests.e2e.checkpoints import make_model
from tests.e2e.node import Node, without_drafts
from tests.e2e.test_host_tier import loads
from tests.loader.adapters import adapter_tensors, modules_of, write_adapter
from tests.loader.packed_checkpoints import pack_checkpoint

PROMPTS = [f"story number {i} begins" for i in range(4)]
NUM_TOKENS = 300
BOTH = "cpu:0+cpu:1"


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """`whole`, `split` and `stages` are the same model, once on one device and twice on two, which have half of each matrix or half
    of the layers; of `split` there are packed files alone. `elm` lives on the second device. No device holds `wide`. `mixture` and
    `experts` are the same mixture of experts, of which each device has half of the experts."""
    folder = tmp_path_factory.mktemp("groups")
    for seed, name in ((1, "whole"), (1, "split"), (1, "stages"), (2, "elm")):
        make_model(folder / "models" / name, seed=seed, dtype="bfloat16", max_position_embeddings=4096)
    pack_checkpoint(folder / "models" / "split")
    (folder / "models" / "split" / "model.safetensors").unlink()
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
    for name in ("mixture", "experts"):
        mixture = {"architecture": "Qwen2MoeForCausalLM", "model_type": "qwen2_moe", **sizes}
        make_model(folder / "models" / name, max_position_embeddings=1024, **mixture)
    make_model(folder / "models" / "odd", num_heads=3, num_kv_heads=3, hidden_size=24)
    make_model(folder / "models" / "wide", weights_bytes=28 << 20, max_position_embeddings=256)
    config = without_drafts("whole", "elm", "split", "stages", "odd", "wide", "mixture", "experts")
    for name in ("whole", "mixture"):
        config = config.replace(f'[models."{name}"]\n', f'[models."{name}"]\ndevices = ["cpu:0"]\n')
    config = config.replace('[models."experts"]\n', '[models."experts"]\nparallel = { expert = 2 }\n')
    config = config.replace('[models."stages"]\n', '[models."stages"]\nparallel = { pipeline = 2 }\n')
    config = config.replace('[models."elm"]\n', '[models."elm"]\ndevices = ["cpu:1"]\n')
    for name in ("split", "odd"):
        config = config.replace(f'[models."{name}"]\n', f'[models."{name}"]\nparallel = {{ tensor = 2 }}\n')
    config = config.replace('[models."wide"]\n', '[models."wide"]\nparallel = "auto"\n')
    flags = ["--dtype", "float32", "--threads", "1", "--adopt-weights", "true", "--host-tier-bytes", "64MiB"]
    with Node(folder, devices=["cpu:0=48MiB", "cpu:1=48MiB"], runner="torch", config=config, flags=flags) as running:
        yield running


@pytest.fixture(scope="module")
def texts(node: Node) -> dict[str, list[str]]:
    """What the models answer to the prompts while nothing disturbs them. Those of `whole` hold for `split` and `stages`."""
    found = {}
    for model in ("whole", "elm"):
        streams = [Stream(node, model, prompt, NUM_TOKENS).join() for prompt in PROMPTS]
        assert [stream.error for stream in streams] == [""] * len(PROMPTS)
        found[model] = [stream.text for stream in streams]
    return found


def row_of(node: Node, model: str) -> dict[str, Any]:
    return next(row for row in node.json("models") if row["name"] == model)


def engine_of(node: Node, device: str) -> int:
    """Returns the process id of a device's engine, once it is up."""

    def pid() -> int:
        return int(next((d["pid"] for d in node.json("status")["devices"] if d["name"] == device and d["up"]), 0))

    return int(node.wait_for(pid, f"an engine on {device}"))


def both_engines(node: Node) -> list[int]:
    return [engine_of(node, device) for device in ("cpu:0", "cpu:1")]


@pytest.mark.parametrize("model", ["split", "stages"])
def test_it_answers_like_the_whole_model(node: Node, texts: dict[str, list[str]], model: str) -> None:
    alone = Stream(node, model, PROMPTS[0], NUM_TOKENS).join()
    assert (alone.error, alone.text) == ("", texts["whole"][0])
    if model == "split":
        assert "read its packed files: there are no plain ones" in node.cli("why", model).stdout
    together = [Stream(node, model, prompt, NUM_TOKENS) for prompt in PROMPTS]
    assert [stream.join().text for stream in together] == texts["whole"]


def test_single_models_beside_it(node: Node, texts: dict[str, list[str]]) -> None:
    streams = [
        (Stream(node, model, prompt, NUM_TOKENS), model, at)
        for at, prompt in enumerate(PROMPTS)
        for model in ("split", "stages", "whole", "elm")
    ]
    for stream, model, at in streams:
        assert stream.join().error == ""
        assert stream.text == texts["elm" if model == "elm" else "whole"][at], model


def test_a_mixture_whose_experts_are_divided(node: Node) -> None:
    streams = {model: [Stream(node, model, prompt, 40) for prompt in PROMPTS] for model in ("mixture", "experts")}
    texts = {model: [stream.join().text for stream in own] for model, own in streams.items()}
    assert texts["experts"] == texts["mixture"] != [""] * len(PROMPTS)
    assert row_of(node, "experts")["device"] == BOTH


def test_what_operators_see(node: Node) -> None:
    Stream(node, "split", "seen", 4).join()
    Stream(node, "whole", "seen", 4).join()
    rows = {row["name"]: row for row in node.ps()}
    assert (rows["split"]["device"], rows["whole"]["device"]) == (BOTH, "cpu:0")
    assert rows["whole"]["weights_bytes"] < rows["split"]["weights_bytes"] < 2 * rows["whole"]["weights_bytes"]
    line = next(line for line in node.cli("ps").stdout.splitlines() if line.startswith("split"))
    assert BOTH in line
    assert f"on {BOTH}" in node.cli("why", "split").stdout
    status = {device["name"]: device for device in node.json("top")["devices"]}
    for device in ("cpu:0", "cpu:1"):
        parts = {part["kind"]: part["bytes"] for part in status[device]["parts"] if part["model"] == "split"}
        assert parts["weights"] * 2 == rows["split"]["weights_bytes"]
        assert parts["reserved"] > 0
    drawn = node.cli("top", "--once").stdout.splitlines()
    assert [line.split()[0] for line in drawn if line.startswith("cpu:")] == ["cpu:0", "cpu:1"]
    (cells,) = [line.split()[1:5] for line in drawn if line.split()[1:2] == ["split"]]
    assert " ".join(cells) == f"split ready {size(rows['split']['weights_bytes'])}", "one row, with the weights of both shares"
    dry = node.json("evict", "--dry-run", "split")
    assert (dry["device"], dry["freed_bytes"]) == (BOTH, sum(parts.values())), "of each"
    assert " of cpu:0 and as much of cpu:1; to load it again" in node.cli("evict", "--dry-run", "split").stdout
    metrics = node.get("/metrics")[1]
    assert f'hearth_model_weights_bytes{{device="{BOTH}",model="split"}} {float(rows["split"]["weights_bytes"])}' in metrics
    assert f'"device": "{BOTH}"' in node.cli("events", "--json").stdout
    placed = [one for one in node.json("history") if one["model"] == "split"]
    assert (placed[-1]["device"], placed[-1]["outcome"]) == (BOTH, "ready")


def test_both_devices_count_its_kv(node: Node) -> None:
    """The one that follows has no requests of the model, and as much of its KV in memory."""

    def counted() -> dict[str, float]:
        page = node.get("/metrics")[1]
        states = re.findall(r'^hearth_device_chunks{device="(cpu:.)",state="(\w+)"} (\S+)$', page, re.MULTILINE)
        chunks = {(device, state): float(number) for device, state, number in states}
        used = dict(re.findall(r'^hearth_device_kv_used_bytes{device="(cpu:.)"} (\S+)$', page, re.MULTILINE))
        assert sum(chunks.values()) == 2 * 24, "both budgets of 48 MiB, in chunks"
        assert {device: float(number) for device, number in used.items()} == {
            device: chunks[device, "kv"] * (2 << 20) for device in ("cpu:0", "cpu:1")
        }
        return {device: chunks[device, "kv"] for device in ("cpu:0", "cpu:1") if chunks[device, "kv"]}

    for model in ("whole", "split", "stages", "elm", "mixture", "experts"):
        assert node.cli("unload", model).returncode == 0
    node.wait_for(lambda: not counted(), "devices without KV")  # engines' figures are up to 0.25 s old
    Stream(node, "split", "counted", 40).join()
    found = node.wait_for(lambda: len(found := counted()) == 2 and found, "KV on both devices")
    assert found["cpu:0"] == found["cpu:1"]


def test_one_that_cannot_be_divided(node: Node) -> None:
    row = row_of(node, "odd")
    assert row["state"] == "refused"
    assert 'models."odd".parallel: num_attention_heads 3 is no multiple of 2' in row["reason"]
    with node.openai() as client, pytest.raises(openai.BadRequestError, match="parallel"):
        client.completions.create(model="odd", prompt="x", max_tokens=1)


def test_auto_splits_what_no_device_holds(node: Node) -> None:
    assert (row_of(node, "wide")["num_ranks"], row_of(node, "whole")["num_ranks"]) == (2, 1)
    line = next(line for line in node.cli("models").stdout.splitlines() if line.startswith("wide"))
    assert line.split()[1:4] == ["cold", "2", "devices"]
    assert "registered, to be split over 2 devices" in node.cli("why", "wide").stdout
    assert Stream(node, "wide", "any", 4).join().error == ""
    assert row_of(node, "wide")["device"] == BOTH
    assert node.cli("unload", "wide").returncode == 0


def test_its_adapters_are_refused(node: Node) -> None:
    from loader.models.catalog import scan_one

    shape = scan_one(node.models / "whole", "whole").shape
    assert shape is not None
    write_adapter(node.folder / "lora", adapter_tensors(modules_of(shape)), base_model_name_or_path="split")
    (node.folder / "lora").rename(node.models / "lora")
    node.cli("reload")
    node.wait_for(lambda: node.state("lora") == "refused", "the adapter's refusal")
    with node.openai() as client, pytest.raises(openai.BadRequestError, match="is split over devices"):
        client.completions.create(model="lora", prompt="x", max_tokens=1)


def test_unloading_and_coming_back(node: Node, texts: dict[str, list[str]]) -> None:
    assert Stream(node, "split", PROMPTS[0], NUM_TOKENS).join().text == texts["whole"][0]
    assert node.cli("unload", "split").returncode == 0
    assert row_of(node, "split")["state"] == "cold"
    assert row_of(node, "split")["device"] == ""
    assert node.json("plan", "split")["device"] == BOTH
    held = {device["name"]: device["parts"] for device in node.json("top")["devices"]}
    assert not [part for parts in held.values() for part in parts if part["model"] == "split"]
    assert node.cli("pin", "split").returncode == 0
    row = node.wait_for(lambda: (found := row_of(node, "split"))["state"] == "ready" and found, "the pinned model")
    assert (row["device"], row["pinned"]) == (BOTH, True)
    assert Stream(node, "split", PROMPTS[1], NUM_TOKENS).join().text == texts["whole"][1]
    assert node.cli("unpin", "split").returncode == 0


@pytest.mark.parametrize("model", ["split", "stages"])
def test_it_comes_back_from_host_memory(node: Node, texts: dict[str, list[str]], model: str) -> None:
    """Host memory has each rank's share, and nothing is read."""
    assert Stream(node, model, PROMPTS[0], 1).join().error == ""
    weights_bytes = next(row["weights_bytes"] for row in node.ps() if row["name"] == model)
    assert node.cli("unload", model, "--to", "warm").returncode == 0
    assert row_of(node, model)["state"] == "warm"
    assert node.json("status")["host_tier"]["weights_bytes"] >= weights_bytes
    assert Stream(node, model, PROMPTS[2], NUM_TOKENS).join().text == texts["whole"][2]
    last = loads(node)[-1]
    assert (last["model"], last["bytes_read"], last["adopted"]) == (model, 0, False)
    assert node.cli("unload", model).returncode == 0
    assert row_of(node, model)["state"] == "cold"


def test_an_unload_under_streams_leaves_no_device_waiting(node: Node, texts: dict[str, list[str]]) -> None:
    """The first device may be in a step for which the other one is told to leave."""
    before = both_engines(node)
    for model in ("split", "stages") * 3:
        stream = Stream(node, model, PROMPTS[2], 3000)
        stream.wait_for_chunks(5)
        stream.hang_up()
        node.cli("unload", model)
    assert Stream(node, "elm", PROMPTS[0], NUM_TOKENS).join().text == texts["elm"][0]
    for model in ("split", "stages"):
        assert Stream(node, model, PROMPTS[0], NUM_TOKENS).join().text == texts["whole"][0]
    assert both_engines(node) == before


@pytest.mark.parametrize("killed", ["cpu:1", "cpu:0"])
def test_a_killed_member_costs_no_stream(node: Node, texts: dict[str, list[str]], killed: str) -> None:
    """Streams of the group start again on new shares, of which none is read again; those of the engine that survives go on."""
    other = {"cpu:0": "elm", "cpu:1": "whole"}[killed]
    survivor, victim = engine_of(node, {"cpu:0": "cpu:1", "cpu:1": "cpu:0"}[killed]), engine_of(node, killed)
    for model in ("split", "stages", other):
        Stream(node, model, "come", 1).join()
    streams = [Stream(node, model, prompt, NUM_TOKENS) for model in ("split", "stages") for prompt in PROMPTS]
    neighbour = Stream(node, other, PROMPTS[0], NUM_TOKENS)
    neighbour.wait_for_chunks(3)
    streams[-1].wait_for_chunks(3)
    num_loads = len(loads(node))
    os.kill(victim, signal.SIGKILL)
    assert any(stream.alive for stream in streams), "the death came too late to cost one anything"
    for at, stream in enumerate(streams):
        assert stream.join().error == ""
        assert stream.text == texts["whole"][at % len(PROMPTS)]
    assert neighbour.join().error == ""
    assert neighbour.text == texts[other][0]
    assert survivor in both_engines(node), "the other engine had to go as well"
    again = {event["model"]: (event["adopted"], event["bytes_read"]) for event in loads(node)[num_loads:]}
    for model in ("split", "stages"):
        assert (row_of(node, model)["state"], row_of(node, model)["device"]) == ("ready", BOTH), "it came back for them"
        assert again[model] == (True, 0)
    assert f"the engine of {killed}" in node.cli("why", "split").stdout
