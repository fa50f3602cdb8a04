"""Split models over overlapping pairs of three devices: they are paused for other work and go on with the same text, and what ends
one pair does not touch another."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from tests.e2e.chat import Stream
from tests.e2e.checkpoints import make_model
from tests.e2e.node import Node, without_drafts
from tests.e2e.test_groups import engine_of, row_of

PAIR = ("tensor", "stages")  # models over the second and the third device
NEXT = "next"  # a model over the first and the second one
PROMPTS = ("story number 1 begins", "why not")
MODEL_LEN = 16 << 10
LONGEST = 15000  # tokens of a stream: more than any test waits for
MORE = 40  # chunks of a stream from before what happens to it, and from after that


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """`big` has room on the second device if nothing else is there."""
    folder = tmp_path_factory.mktemp("pauses")
    reserved = {"tensor": 64 << 10, "stages": 64 << 10, NEXT: 16 << 10, "big": 96 << 10}
    split = {"tensor": "tensor", "stages": "pipeline", NEXT: "tensor"}
    devices = {"big": ["cpu:1"], NEXT: ["cpu:0", "cpu:1"], **{name: ["cpu:1", "cpu:2"] for name in PAIR}}
    config = without_drafts(*reserved)
    for seed, (name, num_tokens) in enumerate(reserved.items()):
        make_model(folder / "models" / name, seed=seed, max_position_embeddings=MODEL_LEN)
        told = f"max_model_len = {MODEL_LEN}\nmax_sequences = 8\nkv_floor_tokens = {num_tokens}\n"
        told += f"devices = {json.dumps(devices[name])}\n"
        if name in split:
            told += f"parallel = {{ {split[name]} = 2 }}\n"
        config = config.replace(f'[models."{name}"]\n', f'[models."{name}"]\n{told}')
    flags = ["--dtype", "float32", "--threads", "1", "--max-num-batched-tokens", "128"]
    flags += ["--overdue-after-s", "0.05", "--preempt-after-s", "0.05"]
    with Node(folder, devices=[f"cpu:{at}=60MiB" for at in range(3)], runner="torch", config=config, flags=flags) as running:
        yield running


def events(node: Node, kind: str, model: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in node.cli("events", "--json").stdout.splitlines()]
    return [event for event in found if event["event"] == kind and event.get("model") == model]


def go_on(streams: Mapping[tuple[str, str], Stream]) -> None:
    """Waits until each stream has got more than it has now."""
    before = {of: stream.num_chunks for of, stream in streams.items()}
    for of, stream in streams.items():
        stream.wait_for_chunks(before[of] + MORE)
        assert stream.error == "", of


def check_texts(node: Node, texts: Mapping[tuple[str, str], str]) -> None:
    """Compares texts, by model and prompt, with what the models say while nothing disturbs them."""
    num_tokens = max(map(len, texts.values())) * 3 // 2  # a few tokens have no text of their own
    alone = {of: Stream(node, *of, num_tokens) for of in texts}
    for of, text in texts.items():
        assert alone[of].join().error == ""
        assert alone[of].text.startswith(text), of


def test_split_models_are_paused_under_streams_and_say_the_same_afterwards(node: Node) -> None:
    """Streams of both are open when another model has to have their memory; it is served meanwhile."""
    streams = {(model, prompt): Stream(node, model, prompt, LONGEST) for model in PAIR for prompt in PROMPTS}
    for stream in streams.values():
        stream.wait_for_chunks(MORE)
    assert Stream(node, "big", "now", 8).join().error == ""
    assert all(stream.alive for stream in streams.values())
    for model in PAIR:
        assert "paused" in [event["new"] for event in events(node, "state", model)]
        assert "paused for big: 2 requests wait for it" in node.cli("why", model).stdout
    go_on(streams)
    check_texts(node, {of: stream.hang_up().text for of, stream in streams.items()})


def test_a_group_goes_on_beside_one_that_loses_a_device(node: Node) -> None:
    """Its streams are not begun again, nor placed again. That of the group that lost a device comes back with the same text."""
    for model in (*PAIR, NEXT):
        assert Stream(node, model, "come", 1).join().error == ""
    lost = Stream(node, NEXT, PROMPTS[0], LONGEST)
    streams = {(model, prompt): Stream(node, model, prompt, LONGEST) for model in PAIR for prompt in PROMPTS}
    for stream in (lost, *streams.values()):
        stream.wait_for_chunks(MORE)
    engines = [engine_of(node, device) for device in ("cpu:0", "cpu:1", "cpu:2")]
    num_states = {model: len(events(node, "state", model)) for model in (*PAIR, NEXT)}
    os.kill(engines[0], signal.SIGKILL)
    node.wait_for(lambda: len(events(node, "state", NEXT)) > num_states[NEXT], "the end of the group")
    go_on(streams)
    assert {model: len(events(node, "state", model)) for model in PAIR} == {model: num_states[model] for model in PAIR}
    for model in PAIR:
        assert (row_of(node, model)["state"], row_of(node, model)["device"]) == ("ready", "cpu:1+cpu:2")
        assert row_of(node, model)["active"] == len(PROMPTS)
    told = {of: stream.hang_up().text for of, stream in streams.items()}
    go_on({(NEXT, PROMPTS[0]): lost})
    told[NEXT, PROMPTS[0]] = lost.hang_up().text
    assert row_of(node, NEXT)["device"] == "cpu:0+cpu:1"
    assert [engine_of(node, device) for device in ("cpu:1", "cpu:2")] == engines[1:]
    check_texts(node, told)
