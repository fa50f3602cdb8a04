"""A model with a replica on each of two devices: the same text as on one device, and the death of an engine makes nobody wait."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.chat import Stream
from tests.e2e.checkpoints import make_model
from tests.e2e.node import Node, without_drafts

PROMPTS = [f"story number {i} begins" for i in range(8)]
NUM_TOKENS = 300
LONG_TOKENS = 2000  # so many that all streams are seen at the same time, on fast machines, too
LONGEST_TOKENS = 4000  # so many that streams last while another model is loaded, on busy machines, too


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """`one` and `two` are the same model, on one device and on both. `wide` fits no device beside a replica."""
    folder = tmp_path_factory.mktemp("replicas")
    for name in ("one", "two"):
        make_model(folder / "models" / name, seed=1, max_position_embeddings=4096)
    make_model(folder / "models" / "wide", weights_bytes=34 << 20, max_position_embeddings=256)
    config = without_drafts("one", "two", "wide")
    config = config.replace('[models."two"]\n', '[models."two"]\nreplicas = 2\n')
    flags = ["--dtype", "float32", "--threads", "1"]
    with Node(folder, devices=["cpu:0=62MiB", "cpu:1=62MiB"], runner="torch", config=config, flags=flags) as running:
        yield running


@pytest.fixture(scope="module")
def texts(node: Node) -> list[str]:
    """What one replica alone answers."""
    streams = [Stream(node, "one", prompt, NUM_TOKENS).join() for prompt in PROMPTS]
    assert [stream.error for stream in streams] == [""] * len(PROMPTS)
    return [stream.text for stream in streams]


def rows(node: Node) -> dict[str, Any]:
    return {row["name"]: row for row in node.json("models")}


def bring_both(node: Node) -> dict[str, str]:
    """Has both replicas loaded; returns the device of each."""

    def both() -> dict[str, str] | None:
        Stream(node, "two", "come", 1).join()
        found = rows(node)
        devices = {name: row["device"] for name, row in found.items() if name in ("two", "two#2") and row["state"] == "ready"}
        return devices if len(devices) == 2 else None

    found: dict[str, str] = node.wait_for(both, "both replicas")
    return found


def test_both_replicas_answer_like_one(node: Node, texts: list[str]) -> None:
    devices = bring_both(node)
    assert set(devices.values()) == {"cpu:0", "cpu:1"}
    streams = [Stream(node, "two", prompt, LONG_TOKENS) for prompt in PROMPTS]
    for stream in streams:
        stream.wait_for_chunks(1)
    active = {name: row["active"] for name, row in rows(node).items() if name in devices}
    for stream, text in zip(streams, texts, strict=True):
        assert stream.join().text.startswith(text[:-4])  # its last bytes may be a part of a character
    assert min(active.values()) > 0
    assert sum(active.values()) <= len(PROMPTS)


def test_what_operators_see(node: Node) -> None:
    bring_both(node)
    found = rows(node)
    assert (found["two#2"]["replica_of"], "replica_of" in found["two"]) == ("two", False)
    assert "replica two#2: ready on " in node.cli("why", "two").stdout
    told = node.cli("why", "two#2").stdout
    assert "loads as another replica: 1 requests of two are there" in told
    assert "it is a replica of two" in told
    with node.openai() as client:
        assert "two#2" not in {model.id for model in client.models.list().data}
    refused = node.cli("load", "two#2")
    assert refused.returncode != 0
    assert "It is a replica: commands take its model's name, 'two'" in refused.stderr
    metrics = node.get("/metrics")[1]
    assert 'model="two#2"' in metrics


def test_a_conversation_goes_on_where_its_prefix_is_cached(node: Node) -> None:
    bring_both(node)
    usage = {"extra_body": {"stream_options": {"include_usage": True}}}
    histories = [f"conversation {number}: " + f"{number} and so on. " * 30 for number in range(6)]
    first = [Stream(node, "two", text, 16, **usage) for text in histories]
    longer = [text + stream.join().text + " and?" for text, stream in zip(histories, first, strict=True)]
    again = [Stream(node, "two", text, 4, **usage) for text in longer]
    for stream in again:
        assert stream.join().error == ""
        cached, prompt = stream.usage["prompt_tokens_details"]["cached_tokens"], stream.usage["prompt_tokens"]
        assert cached > prompt / 2


@pytest.mark.parametrize("killed", ["two", "two#2"])
def test_streams_of_a_killed_engine_go_on_at_the_other_replica(node: Node, texts: list[str], killed: str) -> None:
    devices = bring_both(node)
    victim = next(device["pid"] for device in node.json("status")["devices"] if device["name"] == devices[killed])
    streams = [Stream(node, "two", prompt, NUM_TOKENS) for prompt in PROMPTS]
    for stream in streams:
        stream.wait_for_chunks(2)
    os.kill(victim, signal.SIGKILL)
    assert any(stream.alive for stream in streams), "the death came too late to cost one anything"
    assert [stream.join().error for stream in streams] == [""] * len(PROMPTS)
    assert [stream.text for stream in streams] == texts
    node.wait_for(node.has_all_engines, "the engine that was killed")


def test_a_busy_replica_makes_room_for_another_model(node: Node, texts: list[str]) -> None:
    devices = bring_both(node)
    streams = [Stream(node, "two", prompt, LONGEST_TOKENS) for prompt in PROMPTS]
    for stream in streams:
        stream.wait_for_chunks(1)
    assert Stream(node, "wide", "room", 4).join().error == ""
    assert any(stream.alive for stream in streams), "they ended before the room was needed"
    assert (rows(node)["wide"]["device"], rows(node)["two"]["device"]) == (devices["two#2"], devices["two"])
    for stream, text in zip(streams, texts, strict=True):
        assert stream.join().error == ""
        assert stream.text.startswith(text.rstrip("\ufffd")), "the last character of a shorter text may be half one"
    assert "two#2" not in rows(node)
    node.cli("unload", "wide")
    bring_both(node)
