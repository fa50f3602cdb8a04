"""Pipelines whose first stage is on another host: the same text as on one device, whatever happens to that host."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.chat import Stream
from tests.e2e.checkpoints import make_model
from tests.e2e.lending_host import LendingHost
from tests.e2e.node import Node, wait_gone, without_drafts
from tests.e2e.processes import engines

PROMPTS = [f"story number {i} begins" for i in range(4)]
NUM_TOKENS = 300
BOTH = "cpu:0+cpu:0@b"


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LendingHost]:
    """The other host, with a copy of the model `stages`."""
    folder = tmp_path_factory.mktemp("host")
    make_model(folder / "models" / "stages", seed=1, max_position_embeddings=4096)
    with LendingHost(folder, folder / "models") as running:
        yield running


@pytest.fixture(scope="module")
def node(host: LendingHost, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """`whole` and `stages` are the same model, once on the only device of this host, once divided over both hosts."""
    folder = tmp_path_factory.mktemp("hosts")
    make_model(folder / "models" / "whole", seed=1, max_position_embeddings=4096)
    shutil.copytree(folder / "models" / "whole", folder / "models" / "stages")
    config = without_drafts("whole", "stages")
    config = config.replace('[models."stages"]\n', '[models."stages"]\nparallel = { pipeline = 2 }\n') + host.settings
    flags = ["--dtype", "float32", "--threads", "1"]
    with Node(folder, devices=["cpu:0=48MiB", "cpu:0@b=48MiB"], runner="torch", config=config, flags=flags) as running:
        yield running


@pytest.fixture(scope="module")
def texts(node: Node) -> list[str]:
    streams = [Stream(node, "whole", prompt, NUM_TOKENS).join() for prompt in PROMPTS]
    assert [stream.error for stream in streams] == [""] * len(PROMPTS)
    return [stream.text for stream in streams]


def device_of(node: Node, name: str) -> dict[str, Any]:
    return next(device for device in node.json("status")["devices"] if device["name"] == name)


def engine_there(host: LendingHost) -> int:
    assert host.process is not None
    (engine,) = engines(host.process.pid)
    return int(engine.pid)


def test_it_answers_like_the_whole_model(node: Node, texts: list[str]) -> None:
    alone = Stream(node, "stages", PROMPTS[0], NUM_TOKENS).join()
    assert (alone.error, alone.text) == ("", texts[0])
    together = [(Stream(node, model, prompt, NUM_TOKENS), at) for at, prompt in enumerate(PROMPTS) for model in ("stages", "whole")]
    for stream, at in together:
        assert (stream.join().error, stream.text) == ("", texts[at])


def test_what_operators_see(node: Node) -> None:
    Stream(node, "stages", "seen", 4).join()
    Stream(node, "whole", "seen", 4).join()
    rows = {row["name"]: row for row in node.ps()}
    assert (rows["stages"]["device"], rows["whole"]["device"]) == (BOTH, "cpu:0")
    assert f"on {BOTH}" in node.cli("why", "stages").stdout
    parts = {part["model"]: part["bytes"] for part in device_of_top(node)["parts"] if part["kind"] == "weights"}
    assert list(parts) == ["stages"]
    assert f'device="{BOTH}",model="stages"' in node.get("/metrics")[1]


def device_of_top(node: Node) -> dict[str, Any]:
    return next(device for device in node.json("top")["devices"] if device["name"] == "cpu:0@b")


def test_a_host_that_lends_serves_models_of_its_own(node: Node, texts: list[str], tmp_path: Path) -> None:
    """A daemon beside the lender has the same device's name, a budget of its own, and the same model by another name. Both hosts
    serve at the same time; when that daemon ends, what is lent goes on."""
    make_model(tmp_path / "models" / "own", seed=1, max_position_embeddings=4096)
    flags = ["--dtype", "float32", "--threads", "1"]
    with Node(tmp_path, devices=["cpu:0=48MiB"], runner="torch", config=without_drafts("own"), flags=flags) as there:
        streams = [Stream(at, model, prompt, NUM_TOKENS) for prompt in PROMPTS for at, model in ((node, "stages"), (there, "own"))]
        assert [stream.join().error for stream in streams] == [""] * len(streams)
        assert [stream.text for stream in streams] == [text for text in texts for _ in range(2)]
        assert [row["device"] for row in there.ps()] == ["cpu:0"], "it knows nothing of what is lent"
        lent = Stream(node, "stages", PROMPTS[0], NUM_TOKENS)
        node.wait_for(lambda: lent.num_chunks >= 5, "some tokens")
    assert (lent.join().error, lent.text) == ("", texts[0])


def test_a_killed_engine_there(node: Node, host: LendingHost, texts: list[str]) -> None:
    streams = [Stream(node, "stages", prompt, NUM_TOKENS) for prompt in PROMPTS]
    node.wait_for(lambda: all(stream.num_chunks >= 5 for stream in streams), "some tokens of each stream")
    whole = Stream(node, "whole", PROMPTS[0], NUM_TOKENS)
    os.kill(engine_there(host), signal.SIGKILL)
    assert [stream.join().error for stream in streams] == [""] * len(streams)
    assert [stream.text for stream in streams] == texts
    assert (whole.join().error, whole.text) == ("", texts[0])
    assert "the engine on host b was ended by SIGKILL" in node.log_text()


def test_a_failed_host(node: Node, host: LendingHost, texts: list[str]) -> None:
    """Its models' streams wait until it is back, other models go on."""
    node.wait_for(node.has_all_engines, "an engine on each device")
    streams = [Stream(node, "stages", prompt, NUM_TOKENS) for prompt in PROMPTS]
    node.wait_for(lambda: all(stream.num_chunks >= 5 for stream in streams), "some tokens of each stream")
    pid = engine_there(host)
    host.stop(signal.SIGKILL)
    wait_gone([pid])
    whole = Stream(node, "whole", PROMPTS[0], NUM_TOKENS).join()
    assert (whole.error, whole.text) == ("", texts[0])
    node.wait_for(lambda: "Connection refused" in device_of(node, "cpu:0@b")["problem"], "the reason in `hearth status`")
    assert not any(stream.finish_reason for stream in streams)
    host.start()
    assert [stream.join().error for stream in streams] == [""] * len(streams)
    assert [stream.text for stream in streams] == texts


def test_a_node_that_ends_leaves_nothing_there(node: Node, host: LendingHost) -> None:
    """The last test: the daemon ends here."""
    pid = engine_there(host)
    begin_s = time.monotonic()
    node.stop()
    wait_gone([pid])
    assert time.monotonic() - begin_s < 20.0
    assert host.stop() == 0
    assert any(line.startswith("cpu:0: no longer lent to 127.0.0.1") for line in host.lines)
