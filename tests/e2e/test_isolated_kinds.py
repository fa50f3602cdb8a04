"""Isolated models that are pinned, that are encoders, and whose copies are kept in host memory, side by side with a shared one."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import numpy as np
import pytest

from tests.e2e.chat import Stream
from tests.e2e.checkpoints import make_model
from tests.e2e.node import Node
from tests.e2e.test_embeddings import make_encoder, vectors
from tests.e2e.test_host_tier import MIB, loads
from tests.e2e.test_isolation import device, pid_of, where

CONFIG = "[models.oak]\nisolate = true\npinned = true\n[models.enc]\nisolate = true\n"


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """oak and enc are isolated, oak is pinned, elm lives on what is left; host memory for all three."""
    folder = tmp_path_factory.mktemp("kinds")
    for seed, name in enumerate(("oak", "elm")):
        make_model(folder / "models" / name, seed=seed, weights_bytes=12 * MIB, max_position_embeddings=1024)
    make_encoder(folder / "models" / "enc", num_layers=6, hidden=256)
    flags = ["--dtype", "float32", "--threads", "1", "--max-num-batched-tokens", "128", "--host-tier-bytes", "96MiB"]
    with Node(folder, devices=["cpu=104MiB"], runner="torch", config=CONFIG, flags=flags) as running:
        running.wait_for(lambda: running.state("oak") == "ready", "the pinned model")
        yield running


def text_of(node: Node, model: str) -> str:
    stream = Stream(node, model, "once upon a time", 30).join()
    assert stream.error == ""
    return stream.text


def embedded(node: Node) -> np.ndarray:
    with node.openai() as client:
        return vectors(client.embeddings.create(model="enc", input=["the sky is blue", "why"], encoding_format="float"))


def kill(node: Node, name: str) -> None:
    """The engine of a device; returns when another is up."""
    pid, restarts = pid_of(node, name), device(node, name)["restarts"]
    os.kill(pid, signal.SIGKILL)
    node.wait_for(lambda: device(node, name)["restarts"] > restarts and device(node, name)["up"], f"a new engine on {name}")


def test_a_pinned_one_holds_its_own_part_only(node: Node) -> None:
    assert where(node) == {"oak": "cpu:0/oak"}, "loaded before anybody asked"
    assert device(node, "cpu:0")["held_bytes"] == 0
    text_of(node, "elm")
    assert where(node) == {"oak": "cpu:0/oak", "elm": "cpu:0"}
    refused = node.cli("unload", "oak")
    assert (refused.returncode, refused.stderr) == (5, "hearth: oak is pinned; unpin it first\n")


def test_its_weights_come_back_from_host_memory(node: Node) -> None:
    before = text_of(node, "oak")
    assert node.cli("unpin", "oak").returncode == 0
    assert node.cli("unload", "oak", "--to", "warm").returncode == 0
    assert node.state("oak") == "warm"
    assert node.cli("pin", "oak").returncode == 0
    node.wait_for(lambda: node.state("oak") == "ready", "the pinned model")
    last = loads(node)[-1]
    assert (last["model"], last["bytes_read"]) == ("oak", 0)
    assert text_of(node, "oak") == before


def test_its_copy_outlives_its_engine_and_the_neighbours_engine(node: Node) -> None:
    texts = {name: text_of(node, name) for name in ("oak", "elm")}
    for killed, model, other in (("cpu:0/oak", "oak", "cpu:0"), ("cpu:0", "elm", "cpu:0/oak")):
        num_loads, pid = len(loads(node)), pid_of(node, other)
        kill(node, killed)
        assert {name: text_of(node, name) for name in texts} == texts
        assert [(each["model"], each["bytes_read"]) for each in loads(node)[num_loads:]] == [(model, 0)]
        assert pid_of(node, other) == pid


def test_an_encoder_has_an_engine_and_a_copy_too(node: Node) -> None:
    before = embedded(node)
    assert where(node)["enc"] == "cpu:0/enc"
    num_loads = len(loads(node))
    kill(node, "cpu:0/enc")
    assert np.abs(embedded(node) - before).max() < 1e-5  # texts that come in other batches round differently
    assert [(each["model"], each["bytes_read"]) for each in loads(node)[num_loads:]] == [("enc", 0)]
    assert node.cli("unload", "enc", "--to", "warm").returncode == 0
    assert node.state("enc") == "warm"
    assert np.abs(embedded(node) - before).max() < 1e-5  # texts that come in other batches round differently
    tier = node.json("status")["host_tier"]
    assert tier["weights_bytes"] >= 2 * 12 * MIB + 18 * MIB
