"""An engine is killed under its streams: every accepted request goes on, with the same text."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from engine.host.child_process import OOM_SCORE_ADJ_OVER_DAEMON
from tests.chaos.world import TEXT
from tests.e2e import processes
from tests.e2e.chat import Stream
from tests.e2e.checkpoints import make_model
from tests.e2e.node import Node, without_drafts
from tests.oom import oom_score_adj


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    folder = tmp_path_factory.mktemp("crash")
    make_model(folder / "models" / "oak", seed=1, max_position_embeddings=16384)
    make_model(folder / "models" / "elm", seed=2, architecture="Qwen3ForCausalLM")
    # one model a device, by config, so that a test knows which engine it kills
    config = "".join(f'{without_drafts(name)}devices = ["cpu:{at}"]\n' for at, name in enumerate(("oak", "elm")))
    flags = ["--dtype", "float32", "--threads", "1"]
    devices = ["cpu:0=48MiB", "cpu:1=48MiB"]
    with Node(folder, devices=devices, runner="torch", config=config, flags=flags) as running:
        yield running


def engine_of(node: Node, device: str) -> int:
    """Process id of a device's engine, waiting for it where it is being restarted."""

    def pid() -> int:
        return int(next(d["pid"] for d in node.json("status")["devices"] if d["name"] == device) or 0)

    return int(node.wait_for(pid, f"an engine on {device}"))


def kill(node: Node, device: str) -> None:
    os.kill(engine_of(node, device), signal.SIGKILL)


def run_all(node: Node, requests: list[dict[str, Any]]) -> list[Stream]:
    return [Stream(node, request["model"], request["prompt"], 300, **request["options"]) for request in requests]


def test_the_kernel_ends_the_daemon_after_all_that_it_has_started_when_memory_is_short(node: Node) -> None:
    Stream(node, "oak", "so that there is a text worker", 1).join()
    assert node.process is not None
    daemon = node.process.pid
    told = {process: oom_score_adj(process.pid) for process in psutil.Process(daemon).children(recursive=True)}
    assert processes.engines(daemon)
    assert processes.fork_servers(daemon)
    assert len(processes.with_word(daemon, TEXT)) > 1  # the helper and a worker
    floor = min(1000, oom_score_adj(daemon) + OOM_SCORE_ADJ_OVER_DAEMON)
    assert {process: adj for process, adj in told.items() if adj < floor} == {}


def test_killed_under_streams_all_go_on_with_the_same_text(node: Node) -> None:
    requests = [
        {
            "model": "oak",
            "prompt": f"story number {i} begins",
            "options": {"temperature": 0} if i % 2 else {"temperature": 1.0, "seed": i, "top_p": 0.9},
        }
        for i in range(16)
    ]
    undisturbed = [stream.join() for stream in run_all(node, requests)]
    assert [s.error for s in undisturbed] == [""] * 16

    neighbour = Stream(node, "elm", "meanwhile elsewhere", 1200)
    neighbour.wait_for_chunks(3)
    other_engine = engine_of(node, "cpu:1")
    streams = run_all(node, requests)
    for stream in streams:
        stream.wait_for_chunks(20)
    assert any(stream.alive for stream in streams)
    kill(node, "cpu:0")
    for stream, expected in zip(streams, undisturbed, strict=True):
        assert stream.join().error == ""
        assert stream.text == expected.text
        assert stream.finish_reason == "length"
    assert engine_of(node, "cpu:1") == other_engine
    assert neighbour.join().error == ""
    assert neighbour.finish_reason == "length"


def test_a_request_running_in_two_crashes_ends_with_an_error_and_the_node_serves_on(node: Node) -> None:
    stream = Stream(node, "oak", "it is always me", 15000)
    num_kills = 0
    # a crash counts for a request only where a step of it was running: a kill may fall between two steps, or before the new
    # engine's first, while the client still reads what the last engine sent
    while stream.alive and num_kills < 8:
        stream.wait_for_chunks(stream.num_chunks + 10)
        before = engine_of(node, "cpu:0")
        os.kill(before, signal.SIGKILL)
        num_kills += 1
        node.wait_for(lambda gone=before: engine_of(node, "cpu:0") != gone, "a new engine")
        stream.wait_for_chunks(stream.num_chunks + 1)
    assert "died 2 times" in stream.join().error
    assert num_kills >= 2
    assert stream.text, "what was sent stays sent"
    after = Stream(node, "oak", "and now someone else", 20).join()
    assert after.error == ""
    assert after.finish_reason == "length"


def test_requests_that_arrive_while_the_engine_is_down_wait_for_it(node: Node) -> None:
    kill(node, "cpu:0")
    streams = [Stream(node, "oak", f"patience {i}", 10) for i in range(5)]
    assert [stream.join().error for stream in streams] == [""] * 5


def test_health_and_memory_after_a_crash(node: Node) -> None:
    kill(node, "cpu:0")
    Stream(node, "oak", "again", 5).join()
    status, body = node.get("/healthz")
    assert status == 200, body
    rows = {row["name"]: row for row in node.ps()}
    assert rows["oak"]["active"] == 0
    assert rows["oak"]["queued"] == 0
