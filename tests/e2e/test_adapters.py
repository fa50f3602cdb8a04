"""LoRA adapters behind the daemon: found in the models folder, and served by name in the steps of their base."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest

from tests.e2e.adapters import make_adapter, merge
from tests.e2e.chat import Stream
from tests.e2e.checkpoints import make_model
from tests.e2e.node import SAFETY_S, Node, without_drafts

NAMES = ("red", "green", "blue")
PROMPTS = ("one two three", "what is a socket?", "a")
SMALL = 'chunk_bytes = "64KiB"\n'


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    folder = tmp_path_factory.mktemp("adapters")
    models = folder / "models"
    base = make_model(models / "oak")
    for number, name in enumerate(NAMES):
        make_adapter(base / name, base, seed=number, rank=2 + 3 * number)
        merge(models / f"merged-{name}", base, base / name)
    config = SMALL + without_drafts("oak", *(f"merged-{name}" for name in NAMES))
    with Node(folder, devices=["cpu=96MiB"], runner="torch", config=config, flags=["--dtype", "float32"]) as node:
        yield node


def adapter(name: str) -> str:
    return f"oak/{name}"


def text(node: Node, model: str, prompt: str, max_tokens: int = 24) -> str:
    made = node.openai().completions.create(model=model, prompt=prompt, max_tokens=max_tokens, temperature=0, seed=1)
    return str(made.choices[0].text)


def loads(node: Node) -> int:
    found = re.search(r'^hearth_adapter_loads_total{model="oak"} (\d+)', node.get("/metrics")[1], re.MULTILINE)
    return 0 if found is None else int(found[1])


def test_rows_of_several_adapters_and_of_their_base_share_steps(node: Node) -> None:
    expected = {(adapter(name), prompt): text(node, f"merged-{name}", prompt) for name in NAMES for prompt in PROMPTS}
    expected |= {("oak", prompt): text(node, "oak", prompt) for prompt in PROMPTS}
    assert len(set(expected.values())) == len(expected), "each has a text of its own"
    with ThreadPoolExecutor(len(expected)) as pool:
        told = dict(zip(expected, pool.map(lambda asked: text(node, *asked), expected), strict=True))
    assert told == expected
    assert loads(node) == len(NAMES)
    assert text(node, "oak:red", PROMPTS[0]) == expected[adapter("red"), PROMPTS[0]]
    assert text(node, f"oak:{adapter('red')}", PROMPTS[0]) == expected[adapter("red"), PROMPTS[0]]
    assert loads(node) == len(NAMES)


def test_lists_say_whose_they_are_and_which_are_in_memory(node: Node) -> None:
    text(node, "oak:red", "a")
    node.wait_for(lambda: any(row["device"] for row in node.json("models") if row["name"] == adapter("red")), "its device")
    rows = {row["name"]: row for row in node.json("models")}
    assert (rows[adapter("red")]["base"], rows[adapter("red")]["rank"]) == ("oak", 2)
    listed = {model.id: model.model_dump() for model in node.openai().models.list().data}
    for name in NAMES:
        assert listed[adapter(name)]["parent"] == "oak"
    assert listed["oak"].get("parent") is None


def test_an_unknown_one_is_no_model(node: Node) -> None:
    with pytest.raises(openai.NotFoundError, match="oak:grey"):
        text(node, "oak:grey", "a")


def test_one_that_arrives_is_served_and_one_that_goes_is_not(node: Node) -> None:
    base = node.models / "oak"
    make_adapter(node.models / "late", base, seed=9)
    merge(node.folder / "merged-late", base, node.models / "late")
    shutil.move(node.folder / "merged-late", node.models / "merged-late")
    ids = {"late", "merged-late"}
    node.wait_for(lambda: ids <= {model.id for model in node.openai().models.list().data}, "the folders to be seen")
    assert text(node, "late", PROMPTS[1]) == text(node, "merged-late", PROMPTS[1])
    shutil.rmtree(node.models / "late")
    node.wait_for(lambda: "late" not in {model.id for model in node.openai().models.list().data}, "the folder's end to be seen")
    with pytest.raises(openai.NotFoundError):
        text(node, "late", "a")


def test_a_broken_one_is_refused_by_name_and_its_base_serves_on(node: Node) -> None:
    folder = make_adapter(node.models / "broken", node.models / "oak", seed=3)
    settings = folder / "adapter_config.json"
    settings.write_text(settings.read_text().replace('"bias": "none"', '"bias": "all"'))
    node.wait_for(lambda: "broken" in node.cli("models").stdout, "the folder to be seen")
    with pytest.raises(openai.APIStatusError, match="bias"):
        text(node, "broken", "a")
    assert "bias" in node.cli("why", "broken").stdout
    assert text(node, "oak", PROMPTS[0])


def test_a_killed_engine_costs_no_stream_of_an_adapter(node: Node) -> None:
    expected = [text(node, model, PROMPTS[0], 400) for model in ("merged-red", "merged-blue", "oak")]
    streams = [
        Stream(node, model, PROMPTS[0], 400, extra_body={"ignore_eos": False}) for model in (adapter("red"), "oak:blue", "oak")
    ]
    for stream in streams:
        stream.wait_for_chunks(5)
    (engine,) = node.engine_pids()
    os.kill(engine, signal.SIGKILL)
    assert [stream.join().text for stream in streams] == expected
    assert not any(stream.error for stream in streams)


def post(node: Node, path: str, **body: object) -> tuple[int, str]:
    request = urllib.request.Request(node.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=SAFETY_S) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())["error"]["code"]


def in_memory(node: Node) -> dict[str, int]:
    """Returns the adapters of oak that are in memory, as `hearth top` and the status page show them."""
    (row,) = [row for row in node.json("top")["models"] if row["name"] == "oak"]
    adapters: dict[str, int] = row["adapters"]
    assert row["num_adapters"] >= len(adapters)
    return adapters


def endless(node: Node, model: str) -> Stream:
    return Stream(node, model, PROMPTS[0], 400, extra_body={"ignore_eos": True})


def test_one_is_loaded_by_its_folder_and_a_name_until_it_is_unloaded(node: Node) -> None:
    elsewhere = node.folder / "elsewhere"
    make_adapter(elsewhere / "1", node.models / "oak", seed=20, rank=8)
    make_adapter(elsewhere / "2", node.models / "oak", seed=21, rank=4)
    base = text(node, "oak", PROMPTS[0])
    before = loads(node)
    load = {"lora_name": "team/lora", "lora_path": str(elsewhere / "1")}
    assert post(node, "/v1/load_lora_adapter", **load) == (200, "Success: LoRA adapter 'team/lora' of oak is loaded.")
    node.wait_for(lambda: loads(node) == before + 1, "it to be read before a request names it")
    node.wait_for(lambda: in_memory(node).get("team/lora"), "its place among the adapters in memory")
    one = text(node, "team/lora", PROMPTS[0])
    assert one not in (base, *(text(node, adapter(name), PROMPTS[0]) for name in NAMES))
    assert post(node, "/v1/load_lora_adapter", **load) == (400, "adapter_loaded")
    assert post(node, "/v1/load_lora_adapter", lora_name="oak", lora_path=str(elsewhere / "1")) == (400, "name_taken")
    assert node.openai().models.retrieve("team/lora").model_dump()["parent"] == "oak"
    assert f"loaded it from {elsewhere / '1'}" in node.cli("why", "team/lora").stdout
    # another one under its name; a stream that runs goes on with the one that it began with
    long_one = endless(node, "team/lora").join().text
    stream = endless(node, "team/lora")
    stream.wait_for_chunks(3)
    replaced = node.cli("load", "team/lora", "--adapter", os.path.relpath(elsewhere / "2"), "--replace")
    assert replaced.stdout == "team/lora is loaded, an adapter of oak\n", replaced.stderr
    two = text(node, "team/lora", PROMPTS[0])
    assert two != one
    assert (stream.join().text, stream.error) == (long_one, "")
    node.stop()
    node.start()
    assert text(node, "team/lora", PROMPTS[0]) == two, "the name outlives a restart"
    assert post(node, "/v1/unload_lora_adapter", lora_name="oak/red") == (400, "adapter_in_folder")
    long_two = endless(node, "team/lora").join().text
    stream = endless(node, "team/lora")
    stream.wait_for_chunks(3)
    assert post(node, "/v1/unload_lora_adapter", lora_name="team/lora")[0] == 200
    assert (stream.join().text, stream.error) == (long_two, "")
    node.wait_for(lambda: "team/lora" not in in_memory(node), "its memory to be free")
    with pytest.raises(openai.NotFoundError):
        text(node, "team/lora", "a")
    assert post(node, "/v1/unload_lora_adapter", lora_name="team/lora") == (404, "model_not_found")
    assert node.cli("load", "gone", "--adapter", str(elsewhere / "3")).returncode == 3
    assert node.cli("load", "gone", "--adapter", str(node.models / "oak")).returncode == 4
    assert "--replace: goes with --adapter DIR" in node.cli("load", "oak", "--replace").stderr
    assert node.cli("load", "lora", "--adapter", str(elsewhere / "2")).returncode == 0
    assert node.cli("unload", "lora").stdout == "lora is unloaded\n"
    assert "Traceback" not in node.log_text()


def test_more_adapters_than_fit_take_turns(tmp_path: Path) -> None:
    base = make_model(tmp_path / "models" / "oak", hidden_size=64)
    for number in range(12):
        make_adapter(tmp_path / "models" / f"a{number}", base, seed=number, rank=64)  # 0.6 MiB each
    config = SMALL + '[models."oak"]\nspeculator = "none"\nmax_model_len = 256\n'
    with Node(tmp_path, devices=["cpu=8MiB"], runner="torch", config=config, flags=["--dtype", "float32"]) as node:
        alone = [text(node, f"a{number}", PROMPTS[0]) for number in range(12)]
        assert len(set(alone)) == 12
        with ThreadPoolExecutor(36) as pool:
            told = list(pool.map(lambda number: text(node, f"a{number % 12}", PROMPTS[0]), range(36)))
        assert told == alone * 3
        assert loads(node) > 12, "some left for others"
        assert "Traceback" not in node.log_text()


def test_an_idle_neighbour_leaves_for_an_adapter(tmp_path: Path) -> None:
    """Both models' weights and reserved KV take the device to the last chunk, and an adapter lies in neither."""
    base = make_model(tmp_path / "models" / "oak", weights_bytes=4 << 20)
    make_model(tmp_path / "models" / "elm", weights_bytes=2 << 20)
    make_adapter(base / "red", base, seed=1)
    with Node(tmp_path, devices=["cpu=46MiB"], runner="torch", flags=["--dtype", "float32"]) as node:
        assert text(node, "oak", PROMPTS[0])
        assert text(node, "elm", PROMPTS[0])
        (device,) = node.json("status")["devices"]
        assert device["lease_bytes"] == 0
        assert text(node, "oak:red", PROMPTS[0])
        assert node.state("elm") in ("warm", "cold")
        assert "its room becomes adapters for oak" in node.cli("why", "elm").stdout
