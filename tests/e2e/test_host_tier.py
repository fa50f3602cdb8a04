"""Host memory that outlives evictions and engines: real models, real kills, and what is read from disk for it."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.chat import Stream
from tests.e2e.checkpoints import make_model
from tests.e2e.node import Node, without_drafts

MIB = 1 << 20
NAMES = ("ash", "birch", "cedar")
NUM_TOKENS = 1200  # each model must still be at work when the last has begun, on a busy machine too
PROMPTS = [(name, f"tale {i} of {name}") for name in NAMES for i in range(4)]


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """A device that holds three models of 12 MiB, host memory for all of them."""
    folder = tmp_path_factory.mktemp("host-tier")
    for seed, name in enumerate(NAMES):
        make_model(folder / "models" / name, seed=seed, weights_bytes=12 * MIB)
    flags = ["--dtype", "float32", "--threads", "1", "--max-num-batched-tokens", "128", "--host-tier-bytes", "96MiB"]
    flags += ["--load-deadline-s", "80", "--max-wait-s", "80"]  # the first load waits for kernels to be compiled
    with Node(folder, devices=["cpu:0=96MiB"], runner="torch", config=without_drafts(*NAMES), flags=flags) as running:
        yield running


def loads(node: Node) -> list[dict[str, Any]]:
    events = [json.loads(line) for line in node.cli("events", "--json").stdout.splitlines()]
    return [event for event in events if event["event"] == "loaded"]


def read_chars(pid: int) -> int:
    """Bytes the process has asked for in read calls, from the page cache or from a disk."""
    fields = dict(line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines())
    return int(fields["rchar"])


def at_work(node: Node) -> list[Stream]:
    """Returns four streams on each of the models, all of which are at work."""
    streams = [Stream(node, name, prompt, NUM_TOKENS) for name, prompt in PROMPTS]
    of_model = [streams[at : at + 4] for at in range(0, len(streams), 4)]
    for some in of_model:
        some[0].wait_for_chunks(2)
    assert all(any(stream.alive for stream in some) for some in of_model), "each model was meant to be at work"
    return streams


def go_on_undisturbed(node: Node, streams: list[Stream]) -> None:
    """Asserts that streams whose engine was just killed go on, without an error, with the texts of an undisturbed run."""
    running = [(stream, stream.num_chunks) for stream in streams if stream.alive]
    for stream, num_chunks in running:
        stream.wait_for_chunks(num_chunks + 50)
    for stream in streams:
        ended = not stream.alive
        assert stream.hang_up().error == ""
        assert not ended or stream.finish_reason == "length"
    undisturbed = [Stream(node, name, prompt, NUM_TOKENS) for name, prompt in PROMPTS]
    for stream, other in zip(streams, undisturbed, strict=True):
        other.wait_for_text(len(stream.text))
        assert stream.text
        assert other.text.startswith(stream.text)
    for other in undisturbed:
        other.hang_up()


def test_a_model_that_left_is_warm_and_comes_back_without_a_read(node: Node) -> None:
    first = Stream(node, "ash", "once upon a time", 30).join()
    assert first.error == ""
    assert loads(node)[-1]["bytes_read"] >= 12 * MIB
    node.cli("unload", "ash", "--to", "warm")
    (row,) = node.ps()
    assert (row["name"], row["state"]) == ("ash", "warm")
    (pid,) = node.engine_pids()
    before = read_chars(pid)
    again = Stream(node, "ash", "once upon a time", 30).join()
    assert again.text == first.text
    assert loads(node)[-1]["bytes_read"] == 0
    assert read_chars(pid) - before < MIB
    tier = node.json("status")["host_tier"]
    assert tier["weights_bytes"] >= 12 * MIB
    assert sum(size for kind, size in tier.items() if kind != "bytes") == tier["bytes"] == 96 * MIB


def test_unload_to_cold_gives_its_memory_back_and_to_warm_wants_a_copy(node: Node) -> None:
    node.cli("load", "birch")
    free = node.json("status")["host_tier"]["free_bytes"]
    node.cli("unload", "birch")
    assert node.json("status")["host_tier"]["free_bytes"] > free
    assert "birch" not in {row["name"] for row in node.ps()}
    done = node.cli("unload", "birch", "--to", "warm")
    assert done.returncode == 4
    assert "no copy of birch is in host memory" in done.stderr


def test_a_killed_engine_costs_no_read_and_no_request(node: Node) -> None:
    """Three models, some streams on each."""
    for name in NAMES:
        assert Stream(node, name, "hello", 1).join().error == ""
    num_loads = len(loads(node))
    streams = at_work(node)
    (killed,) = node.engine_pids()
    os.kill(killed, signal.SIGKILL)
    go_on_undisturbed(node, streams)
    again = loads(node)[num_loads:]
    assert sorted(event["model"] for event in again) == sorted(NAMES)
    assert [event["bytes_read"] for event in again] == [0, 0, 0]
    metrics = node.get("/metrics")[1]
    assert 'hearth_swap_ins_total{reason="resumed",tier="host"} 3.0' in metrics
    assert 'hearth_out_of_memory_total{device="cpu:0"} 0.0' in metrics


def test_a_copy_of_files_that_changed_is_not_used(node: Node) -> None:
    before = Stream(node, "cedar", "the end of", 30).join().text
    node.cli("unload", "cedar", "--to", "warm")
    make_model(node.models / "cedar", seed=77, weights_bytes=12 * MIB)
    node.wait_for(lambda: "cedar" not in {row["name"] for row in node.ps()}, "cedar to be cold")
    assert Stream(node, "cedar", "the end of", 30).join().text != before
    assert loads(node)[-1]["bytes_read"] >= 12 * MIB
