"""Memory for one of two models, long streams on the first and requests for the second: both are served, nobody sees an error.

Once with KV saved in host memory, and once where there is none and KV is computed again."""

from __future__ import annotations

import json
import re
import threading
import urllib.request
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from tests.e2e.chat import Stream
from tests.e2e.checkpoints import make_model
from tests.e2e.node import Node

MIB = 1 << 20
FEWEST_TOKENS, MOST_TOKENS = 300, 1500
LONG_S = 2.0  # of the engine's time that the long streams take: they outlast a load of the other model and its streams
CHUNK_STATES = ("work_space", "weights", "kv", "free")
USAGE: dict[str, Any] = {"stream_options": {"include_usage": True}}


@pytest.fixture(scope="module", params=["128MiB", "0"], ids=["saved", "recomputed"])
def node(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    folder = tmp_path_factory.mktemp("preemption")
    for seed, name in enumerate(["first", "second"]):
        make_model(folder / "models" / name, seed=seed, weights_bytes=24 * MIB)
    flags = ["--dtype", "float32", "--overdue-after-s", "0.1", "--preempt-after-s", "0.1", "--threads", "1"]
    flags += ["--max-num-batched-tokens", "128", "--host-tier-bytes", request.param, "--sse-comment-every-s", "0.03"]
    flags += ["--load-deadline-s", "80", "--max-wait-s", "80"]  # the first load waits for kernels to be compiled
    with Node(folder, devices=["cpu:0=56MiB"], runner="torch", flags=flags) as running:
        yield running


class Lines(threading.Thread):
    """One stream as it comes: `t` for an event with text, `c` for a comment, in their order."""

    def __init__(self, node: Node, model: str, prompt: str, max_tokens: int) -> None:
        super().__init__(daemon=True)
        body = {"model": model, "prompt": prompt, "max_tokens": max_tokens, "stream": True, "ignore_eos": True}
        headers = {"Content-Type": "application/json"}
        self._request = urllib.request.Request(node.url + "/v1/completions", json.dumps(body).encode(), headers)
        self.seen = ""
        self.start()

    def run(self) -> None:
        with urllib.request.urlopen(self._request, timeout=90) as response:
            for line in response:
                self.seen += {b"d": "t", b":": "c"}.get(line[:1], "")


def num_tokens_of(node: Node) -> int:
    """Returns how many tokens three long streams have. A fast machine is done with few of them before anybody has to wait. What
    counts is the engine's own time, since other tests may take the cores now and not later."""
    engine = psutil.Process(node.json("status")["devices"][0]["pid"])
    before_s = engine.cpu_times().user
    streams = [Stream(node, "first", f"number {i} of", FEWEST_TOKENS) for i in range(3)]
    assert [stream.join().error for stream in streams] == [""] * 3
    return max(FEWEST_TOKENS, min(MOST_TOKENS, int(FEWEST_TOKENS * LONG_S / (engine.cpu_times().user - before_s))))


def states(node: Node, model: str) -> list[str]:
    events = [json.loads(line) for line in node.cli("events", "--json").stdout.splitlines()]
    return [event["new"] for event in events if event["event"] == "state" and event["model"] == model]


def test_streams_are_paused_for_overdue_work_and_go_on_with_the_same_text(node: Node) -> None:
    for name in ("second", "first", "second", "first"):  # what a load takes is known, without the engine's own start
        node.cli("load", name)
    num_tokens = num_tokens_of(node)
    undisturbed = [Stream(node, "first", f"story {i} of", num_tokens, **USAGE) for i in range(3)]
    assert [stream.join().error for stream in undisturbed] == [""] * 3
    assert all("hearth" not in stream.usage for stream in undisturbed), "usage has nothing of its own unless there was a pause"
    expected = [stream.text for stream in undisturbed]

    # other prompts' KV may be in the prefix cache now; a new load starts without it
    node.cli("unload", "first")
    streams = [Stream(node, "first", f"story {i} of", num_tokens, **USAGE) for i in range(3)]
    lines = Lines(node, "first", "story 0 of", num_tokens)
    for stream in streams:
        stream.wait_for_chunks(20)
    node.wait_for(lambda: lines.seen, "the first tokens")
    # they take a while, too, so that comments are due meanwhile
    others = [Stream(node, "second", f"number {i}", num_tokens // 4) for i in range(4)]
    assert [stream.join().error for stream in others] == [""] * 4
    assert all(stream.alive for stream in streams), "the long streams were meant to outlast the others"
    assert [stream.join().error for stream in streams] == [""] * 3
    assert [stream.text for stream in streams] == expected
    assert "paused" in states(node, "first")
    for stream in streams:
        told = stream.usage["hearth"]
        assert told["preemptions"] >= 1  # once, unless this machine takes its time
        saved = "128MiB" in node.flags
        assert (told["restored_tokens"] > 0) == saved, "with host memory KV is saved"
        # of the prompt and what was said so far all but the newest token, where it was saved
        assert told["recomputed_tokens"] == told["preemptions"] if saved else told["recomputed_tokens"] > 20
        assert stream.usage["completion_tokens"] == num_tokens
    lines.join(90)
    assert re.fullmatch("t+(c+t+)+", lines.seen), "comments while it was paused, then text again"
    why = node.cli("why", "first").stdout
    assert "paused for second: 4 requests wait for it" in why


def test_what_pauses_took_is_on_the_metrics_page(node: Node) -> None:
    """After the test above: point by point what an operator asks of swaps."""
    samples = dict(line.rsplit(" ", 1) for line in node.get("/metrics")[1].splitlines() if line.startswith("hearth_"))
    found = {name: float(value) for name, value in samples.items()}
    saved = "128MiB" in node.flags
    left = "host" if saved else "disk"
    assert found[f'hearth_swap_outs_total{{reason="preempted",tier="{left}"}}'] >= 1
    assert found[f'hearth_swap_ins_total{{reason="resumed",tier="{left}"}}'] >= 1
    assert found['hearth_model_preemptions_total{model="first"}'] >= 1
    assert found['hearth_requests_paused_total{model="first"}'] >= 4
    for what, is_there in (("saved", saved), ("restored", saved), ("recomputed", True)):
        assert (found[f'hearth_kv_tokens_total{{model="first",what="{what}"}}'] > 0) == is_there, what
    phases = {name: found[f'hearth_swap_seconds_total{{phase="{name}"}}'] for name in ("drain", "evict", "save", "copy", "read")}
    assert phases["drain"] > 0
    assert phases["evict"] > 0
    assert (phases["save"] > 0) == (phases["copy"] > 0) == saved
    assert found["hearth_eviction_age_seconds_count"] >= 1
    chunks = {state: found[f'hearth_device_chunks{{device="cpu:0",state="{state}"}}'] for state in CHUNK_STATES}
    assert sum(chunks.values()) == 28
    assert found['hearth_device_planned_bytes{device="cpu:0"}'] == (chunks["weights"] + chunks["kv"]) * 2 * MIB
    assert found['hearth_device_measured_bytes{device="cpu:0"}'] > 0
    assert found['hearth_kv_moved_bytes_total{device="cpu:0"}'] >= 0
    assert found['hearth_out_of_memory_total{device="cpu:0"}'] == 0
