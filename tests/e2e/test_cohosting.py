"""Several real models on less memory than they need, seen through HTTP and the CLI (docs/design/models.md)."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.e2e.chat import Stream
from tests.e2e.checkpoints import make_model
from tests.e2e.node import Node, without_drafts

MIB = 1 << 20
SIZE: dict[str, Any] = {"hidden_size": 128, "num_layers": 8, "weights_bytes": 24 * MIB}


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """Two devices that hold one model of 24 MiB each; four such models, one small one and one that can never fit."""
    folder = tmp_path_factory.mktemp("cohosting")
    for seed, name in enumerate(["ash", "birch", "cedar", "org/dogwood"]):
        make_model(folder / "models" / name, seed=seed, **SIZE)
    make_model(folder / "models" / "giant", **{**SIZE, "weights_bytes": 80 * MIB})
    flags = ["--dtype", "float32", "--overdue-after-s", "1", "--threads", "1", "--max-num-batched-tokens", "128"]
    config = without_drafts("ash", "birch", "cedar", "org/dogwood")
    with Node(folder, devices=["cpu:0=56MiB", "cpu:1=56MiB"], runner="torch", config=config, flags=flags) as running:
        yield running


def count(node: Node, old: str, new: str) -> int:
    """How often a model went from `old` to `new` so far."""
    events = [json.loads(line) for line in node.cli("events", "--json").stdout.splitlines()]
    return sum(event["event"] == "state" and event["old"] == old and event["new"] == new for event in events)


def complete(node: Node, model: str, prompt: str = "once upon a time", max_tokens: int = 24, **options: Any) -> Any:
    with node.openai() as client:
        return client.completions.create(
            model=model, prompt=prompt, max_tokens=max_tokens, temperature=0, extra_body={"ignore_eos": True}, **options
        )


def devices(node: Node) -> dict[str, str]:
    return {row["name"]: row["device"] for row in node.ps() if row["state"] == "ready"}


def test_the_third_model_evicts_the_idle_one_and_it_comes_back_with_the_same_text(node: Node) -> None:
    first = complete(node, "ash").choices[0].text
    complete(node, "birch")
    where = devices(node)
    assert set(where) == {"ash", "birch"}
    assert where["ash"] != where["birch"], "placement did not use the free device"

    busy = Stream(node, "birch", "the long story of", 600)
    busy.wait_for_chunks(3)
    complete(node, "cedar")
    assert busy.alive, "the stream was meant to outlast the eviction"
    assert set(devices(node)) == {"birch", "cedar"}, "the idle model makes room, the busy one stays"
    busy.join()
    assert not busy.error
    assert busy.finish_reason == "length"

    assert complete(node, "ash").choices[0].text == first


def test_many_requests_for_one_cold_model_cause_one_load_and_one_eviction(node: Node) -> None:
    node.cli("unload", "cedar")
    complete(node, "ash")
    complete(node, "birch")
    loads, evictions = count(node, "loading", "ready"), count(node, "draining", "cold")
    streams = [Stream(node, "cedar", f"number {i}", 8) for i in range(20)]
    assert [stream.join().error for stream in streams] == [""] * 20
    assert count(node, "loading", "ready") == loads + 1
    assert count(node, "draining", "cold") == evictions + 1


def test_a_busy_model_gives_way_to_overdue_work_and_is_never_cut_off(node: Node) -> None:
    """Both devices are busy and stay so: the waiting model gets its turn when it is overdue; nobody loses a token."""
    complete(node, "ash")
    complete(node, "birch")
    stop = time.monotonic() + 2.5
    running: list[Stream] = [Stream(node, model, f"{model} {i}", 400) for model in ("ash", "birch") for i in range(2)]
    waiting = Stream(node, "cedar", "let me in", 8)
    while time.monotonic() < stop and waiting.alive:
        running += [Stream(node, model, f"{model} more", 100) for model in ("ash", "birch")]
        time.sleep(0.1)
    assert waiting.join().error == ""
    for stream in running:
        assert stream.join().error == ""
        assert stream.finish_reason == "length"


def test_a_pinned_model_stays_whatever_is_asked(node: Node) -> None:
    assert node.cli("pin", "org/dogwood").returncode == 0
    for model in ("ash", "birch", "cedar", "ash"):
        complete(node, model)
        assert "org/dogwood" in devices(node)
    assert node.cli("unpin", "org/dogwood").returncode == 0


def test_pins_that_exceed_memory_are_refused_with_the_arithmetic(node: Node) -> None:
    assert node.cli("pin", "ash").returncode == 0
    assert node.cli("pin", "birch").returncode == 0
    third = node.cli("pin", "cedar")
    assert third.returncode == 4, third.stdout + third.stderr
    assert "MiB" in third.stdout + third.stderr
    with node.openai() as client, pytest.raises(openai.APIStatusError) as refused:
        client.completions.create(model="cedar", prompt="x", max_tokens=1)
    assert refused.value.status_code == 503
    for model in ("ash", "birch"):
        assert node.cli("unpin", model).returncode == 0
    assert complete(node, "cedar").usage.completion_tokens == 24


def test_a_model_that_can_never_fit_is_refused_by_name_and_number(node: Node) -> None:
    assert node.state("giant") == "refused"
    with pytest.raises(openai.BadRequestError) as refused:
        complete(node, "giant")
    assert refused.value.code == "model_too_large"
    assert "weights" in str(refused.value)
    assert "MiB" in str(refused.value)
    assert node.cli("load", "giant").returncode == 4


def test_unload_under_a_stream_loses_nothing(node: Node) -> None:
    quiet = Stream(node, "ash", "a story", 300).join()
    stream = Stream(node, "ash", "a story", 300)
    stream.wait_for_chunks(5)
    assert node.cli("unload", "ash").returncode == 0
    assert stream.join().error == ""
    assert stream.text == quiet.text


def test_changed_files_never_touch_the_running_copy(node: Node) -> None:
    before = complete(node, "ash").choices[0].text
    folder = node.models / "ash"
    weights = (folder / "model.safetensors").read_bytes()
    make_model(folder, seed=77, **SIZE)
    stream = Stream(node, "ash", "once upon a time", 24).join()
    assert stream.text == before, "the loaded copy changed under its clients"
    assert node.cli("unload", "ash").returncode == 0
    node.wait_for(lambda: complete(node, "ash").choices[0].text != before, "the new weights")
    (folder / "model.safetensors").write_bytes(weights)
    node.cli("unload", "ash")


def test_a_folder_that_vanishes_drains_and_is_gone(node: Node, tmp_path: Path) -> None:
    make_model(node.models / "guest", seed=5)
    node.wait_for(lambda: node.state("guest") == "cold", "registration of a new folder")
    stream = Stream(node, "guest", "i will leave", 600)
    stream.wait_for_chunks(3)
    (node.models / "guest").rename(tmp_path / "guest")
    assert stream.join().error == ""
    assert stream.finish_reason == "length"
    node.wait_for(lambda: node.state("guest") == "absent", "eviction of the vanished model")
    with pytest.raises(openai.NotFoundError):
        complete(node, "guest")
