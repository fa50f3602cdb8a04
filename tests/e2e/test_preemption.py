"""Memory for one of two models, long streams on the first and requests for the second: both are served, nobody sees an error."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.chat import Stream
from tests.e2e.checkpoints import make_model
from tests.e2e.node import Node

MIB = 1 << 20
NUM_TOKENS = 1000
USAGE: dict[str, Any] = {"stream_options": {"include_usage": True}}


@pytest.fixture(scope="module", params=[("null", "0"), ("torch", "128MiB")], ids=["null", "torch"])
def node(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    runner, host_tier = request.param
    folder = tmp_path_factory.mktemp("preemption")
    for seed, name in enumerate(["first", "second"]):
        make_model(folder / "models" / name, seed=seed, weights_bytes=24 * MIB)
    flags = ["--dtype", "float32", "--overdue-after-s", "0.3", "--preempt-after-s", "0.3", "--threads", "1"]
    flags += ["--max-num-batched-tokens", "128", "--host-tier-bytes", host_tier, "--sse-comment-every-s", "0.2"]
    flags += ["--load-deadline-s", "80", "--max-wait-s", "80"]  # the first load waits for kernels to be compiled
    with Node(folder, devices=["cpu:0=56MiB"], runner=runner, null_step_ms=3, flags=flags) as running:
        yield running


def states(node: Node, model: str) -> list[str]:
    events = [json.loads(line) for line in node.cli("events", "--json").stdout.splitlines()]
    return [event["new"] for event in events if event["event"] == "state" and event["model"] == model]


def test_streams_are_paused_for_overdue_work_and_go_on_with_the_same_text(node: Node) -> None:
    for name in ("second", "first", "second", "first"):  # what a load takes is known, without the engine's own start
        node.cli("load", name)
    undisturbed = [Stream(node, "first", f"story {i} of", NUM_TOKENS, **USAGE) for i in range(3)]
    assert [stream.join().error for stream in undisturbed] == [""] * 3
    assert all("hearth" not in stream.usage for stream in undisturbed), "usage has nothing of its own unless there was a pause"
    expected = [stream.text for stream in undisturbed]

    # other prompts' KV may be in the prefix cache now; a new load starts without it
    node.cli("unload", "first")
    streams = [Stream(node, "first", f"story {i} of", NUM_TOKENS, **USAGE) for i in range(3)]
    for stream in streams:
        stream.wait_for_chunks(20)
    others = [Stream(node, "second", f"number {i}", 8) for i in range(4)]
    assert [stream.join().error for stream in others] == [""] * 4
    assert all(stream.alive for stream in streams), "the long streams were meant to outlast the others"
    assert [stream.join().error for stream in streams] == [""] * 3
    assert [stream.text for stream in streams] == expected
    assert "paused" in states(node, "first")
    for stream in streams:
        told = stream.usage["hearth"]
        assert told["preemptions"] == 1
        assert (told["restored_tokens"] > 0) == (node.runner == "torch"), "with host memory KV is saved"
        assert stream.usage["completion_tokens"] == NUM_TOKENS
    why = node.cli("why", "first").stdout
    assert "paused for second: 3 requests wait for it" in why
