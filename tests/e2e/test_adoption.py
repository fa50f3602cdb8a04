"""Weights that outlive their engine: real models, real kills, nothing read and nothing copied."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.chat import Stream
from tests.e2e.checkpoints import make_model
from tests.e2e.node import Node, program_with, without_drafts
from tests.e2e.test_host_tier import MIB, NAMES, at_work, go_on_undisturbed, loads, read_chars


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """A device that holds three models of 12 MiB, no host memory. The KV is small: some is drawn from the lease."""
    folder = tmp_path_factory.mktemp("adoption")
    for seed, name in enumerate(NAMES):
        make_model(folder / "models" / name, seed=seed, weights_bytes=12 * MIB)
    flags = ["--dtype", "float32", "--threads", "1", "--max-num-batched-tokens", "128", "--adopt-weights", "true"]
    flags += ["--load-deadline-s", "80", "--max-wait-s", "80"]  # the first load waits for kernels to be compiled
    # all that an engine lives in these tests is early
    early: dict[str, Any] = {"program": program_with({"daemon.engines.left_memory.EARLY_S": 600.0})}
    with Node(folder, devices=["cpu:0=96MiB"], runner="torch", config=without_drafts(*NAMES), flags=flags, **early) as running:
        yield running


def kill(node: Node) -> int:
    """The next engine's process id."""
    (killed,) = node.engine_pids()
    os.kill(killed, signal.SIGKILL)
    return int(node.wait_for(lambda: next((pid for pid in node.engine_pids() if pid != killed), 0), "another engine"))


def test_a_killed_engine_costs_neither_a_read_nor_a_copy_nor_a_request(node: Node) -> None:
    for name in NAMES:
        assert Stream(node, name, "hello", 1).join().error == ""
    assert all(event["bytes_read"] >= 12 * MIB for event in loads(node))
    num_loads = len(loads(node))
    streams = at_work(node)
    pid = kill(node)
    go_on_undisturbed(node, streams)
    again = loads(node)[num_loads:]
    assert sorted(event["model"] for event in again) == sorted(NAMES)
    assert [(event["adopted"], event["bytes_read"]) for event in again] == [(True, 0)] * 3
    assert "taken over from the engine before" in node.cli("why", "ash").stdout
    metrics = node.get("/metrics")[1]
    assert 'hearth_swap_ins_total{reason="resumed",tier="device"} 3.0' in metrics
    assert 'hearth_swap_seconds_total{phase="copy"} 0.0' in metrics
    before = read_chars(pid)
    node.cli("unload", "ash")
    assert Stream(node, "ash", "tale 0 of ash", 30).join().error == ""
    assert read_chars(pid) - before >= 12 * MIB, "what has left the device is read again"


def test_an_idle_model_is_there_for_the_next_request(node: Node) -> None:
    for name in NAMES:
        assert Stream(node, name, "good night", 5).join().error == ""
    kill(node)
    assert {row["state"] for row in node.ps()} <= {"cold"}
    first = Stream(node, "birch", "good morning", 5).join()
    assert first.error == ""
    assert (loads(node)[-1]["model"], loads(node)[-1]["adopted"]) == ("birch", True)


def test_the_third_engine_in_a_row_to_die_early_is_not_followed_on_the_same_memory(node: Node) -> None:
    """The first was none that had taken anything over. Serving goes on, from the files."""
    kill(node)
    assert "weights on the device are given up: 2 engines that had taken them over died early" in node.log_text()
    assert Stream(node, "birch", "once more", 5).join().error == ""
    (last,) = loads(node)[-1:]
    assert (last["adopted"], last["bytes_read"] >= 12 * MIB) == (False, True)
    kill(node)
    assert Stream(node, "birch", "and again", 5).join().error == ""
    assert loads(node)[-1]["adopted"]
