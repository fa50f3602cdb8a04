"""Tests of how the models of one engine share its memory."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from engine.contracts.group_share import GroupShare
from engine.contracts.loads import LoadTask
from engine.contracts.steps import LaunchesAhead
from engine.null.runner import NullModel, NullRunner
from engine.protocol import LoadModel, SamplingParams
from engine.serve.served_models import CAPTURE_EVERY_DECODES, ServedModels
from loader.shapes.kv_layout import KVGroupSpec
from scheduler.batch.plan import IntArray
from scheduler.batch.request import BatchRequest
from tests.engine.engine_process import load_message, null_checkpoint, null_configure

CHUNK_BYTES = 1 << 16  # 8 blocks of the null model, 128 tokens


class RecordingArena:
    def __init__(self) -> None:
        self.discarded: set[int] = set()
        self.copied: list[tuple[int, int]] = []

    def discard(self, chunk: int, num_chunks: int, /) -> None:
        self.discarded |= set(range(chunk, chunk + num_chunks))

    def copy_within(self, piece_bytes: int, sources: IntArray, targets: IntArray, /) -> None:
        self.copied += zip(sources.tolist(), targets.tolist(), strict=True)


class Node:
    """Null models that are stepped by hand, without an engine process."""

    def __init__(self, folder: Path, **configure: Any) -> None:
        self.folder = folder
        self.configure = null_configure(null_step_ms=0.0, **configure)
        self.arena = RecordingArena()
        self.models = ServedModels(self.configure, self.arena)
        self.steps = 0

    def load(self, name: str, reserved: int = 2, lease: int = 16) -> NullModel:
        spec = load_message(null_checkpoint(self.folder / name), name, kv_reserved_chunks=reserved, lease_chunks=lease)
        return self.add(spec)

    def remove(self, name: str) -> None:
        served = self.models.detach(name)
        assert served is not None
        self.models.free(served)

    def add(self, spec: LoadModel) -> NullModel:
        self.models.set_lease(spec.lease_chunks)
        place = self.models.take_place(spec)
        hosted = NullRunner(self.configure).load(LoadTask(spec, place.weights, lambda *_: None, lambda: False))
        assert isinstance(hosted, NullModel)
        self.models.add(self.models.make(spec, hosted, place))
        self.models.keep_lease()
        return hosted

    def submit(self, name: str, request_id: int, num_prompt: int, max_tokens: int = 8) -> None:
        tokens = np.full(num_prompt, request_id, np.int32)
        params = SamplingParams(max_tokens, seed=request_id)
        self.models.by_name[name].scheduler.submit(BatchRequest(request_id, tokens, num_prompt, params))

    def step(self, name: str) -> bool:
        served = self.models.by_name[name]
        plan = served.scheduler.plan(self.steps)
        if plan is None:
            return False
        self.steps += 1
        result = served.hosted.execute(plan, served.scheduler.table)
        served.scheduler.finish_step(plan, result.ids, result.bad)
        return True

    def run(self, name: str) -> None:
        while self.step(name):
            pass

    def drawn(self, name: str) -> int:
        return self.models.by_name[name].scheduler.kv.num_drawn_chunks


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def test_one_lease_for_all(node: Node) -> None:
    node.load("a")
    node.load("b", lease=4)
    for request_id in range(1, 7):
        node.submit("a" if request_id % 2 else "b", request_id, 200, 50)
    for _ in range(20):
        node.step("a")
        node.step("b")
        assert node.drawn("a") + node.drawn("b") <= 4
    assert node.drawn("a") + node.drawn("b") >= 3


def test_a_smaller_lease_takes_kept_prefixes_first(node: Node) -> None:
    node.load("idle")
    node.load("busy")
    for request_id in range(1, 5):
        node.submit("idle", request_id, 200)
        node.run("idle")
    assert node.drawn("idle") >= 4
    node.submit("busy", 10, 200, 50)
    node.submit("busy", 11, 200, 50)
    node.step("busy")
    busy_chunks = node.drawn("busy")
    assert busy_chunks > 0
    node.models.set_lease(busy_chunks)
    assert node.drawn("idle") == 0
    stats = node.models.stats(node.steps)
    assert stats.preemptions == 0
    assert stats.models["busy"][1] == 2
    assert stats.models["busy"][0] > 0
    node.models.set_lease(0)
    assert node.drawn("busy") == 0
    stats = node.models.stats(node.steps)
    assert stats.preemptions > 0
    assert stats.models["busy"][1] + stats.models["busy"][2] == 2


def test_an_idle_models_prefixes_make_room_for_a_busy_one(node: Node) -> None:
    node.load("idle")
    node.load("busy", lease=4)
    for request_id in range(1, 5):
        node.submit("idle", request_id, 180)
        node.run("idle")
    assert node.drawn("idle") == 4
    for request_id in range(10, 13):
        node.submit("busy", request_id, 200, 50)
    node.step("busy")
    assert node.drawn("idle") < 4
    assert node.drawn("busy") > 0
    node.models.discard_returned()
    assert node.models.stats(0).models["busy"][1] >= 2


def half_empty(node: Node, name: str, request_id: int = 1) -> int:
    """Runs eight sequences of 5 blocks and aborts every second one, so that the model's chunks have gaps and no prefix is kept.
    Returns the number of its chunks."""
    for number in range(8):
        node.submit(name, request_id + number, 70, 100)
    scheduler = node.models.by_name[name].scheduler
    while scheduler.num_decoding < 8:
        assert node.step(name)
    for number in range(0, 8, 2):
        scheduler.abort(request_id + number)
    for group in scheduler.kv.groups:
        group.pool.put_free(np.array(group.prefixes.give_up(1000), np.int32))
    return node.drawn(name)


def test_a_smaller_lease_moves_blocks_before_it_stops_anybody(node: Node) -> None:
    node.load("a", reserved=1)
    drawn = half_empty(node, "a")
    running = node.models.stats(0).models["a"]
    node.models.set_lease(drawn - 2)
    assert node.drawn("a") <= drawn - 2
    stats = node.models.stats(0)
    assert stats.preemptions == 0
    assert stats.models["a"] == running
    assert node.arena.copied
    assert len(node.arena.copied) == len({target for _, target in node.arena.copied})
    (group,) = node.models.by_name["a"].scheduler.kv.groups
    assert stats.kv_moved_bytes == len(node.arena.copied) * group.block_bytes
    node.models.set_lease(0)
    assert node.models.stats(0).preemptions > 0, "there is no other way"
    node.models.set_lease(16)
    node.run("a")
    node.models.by_name["a"].scheduler.kv.groups[0].pool.check()


def test_a_models_growth_takes_what_another_leaves_unused_in_its_chunks(node: Node) -> None:
    node.load("sparse", reserved=1, lease=12)
    node.load("busy", reserved=1, lease=12)
    drawn = half_empty(node, "sparse")
    node.models.set_lease(drawn)
    node.submit("busy", 100, 200, 40)
    node.submit("busy", 101, 200, 40)
    node.step("busy")
    assert node.arena.copied
    assert node.drawn("sparse") < drawn
    stats = node.models.stats(0)
    assert stats.models["busy"][1] == 2, "both run"
    assert stats.models["sparse"][1] == 4, "and nobody had to stop for them"
    assert stats.preemptions == 0


def test_removing_a_model_gives_all_its_memory_back(node: Node) -> None:
    node.load("a", reserved=3)
    for request_id in range(1, 5):
        node.submit("a", request_id, 200, 50)
    node.step("a")
    owned = set(np.flatnonzero(~node.models.chunks.free).tolist())
    assert len(owned) > 3
    node.remove("a")
    assert node.models.chunks.free.all()
    assert node.models.detach("a") is None
    assert node.models.busy() == []
    assert node.models.stats(0).models == {}


def test_memory_stays_with_its_chunk_up_to_the_limit(tmp_path: Path) -> None:
    """Freed chunks keep their memory, but no more than 44 chunks have memory at a time: 64, less 20 for the work space."""
    node = Node(tmp_path, work_space_bytes=20 * CHUNK_BYTES)
    chunks = node.models.chunks
    for name in ("a", "b", "c"):
        node.load(name, reserved=9)
        node.submit(name, 1, 200)
        node.run(name)
    used = np.flatnonzero(~chunks.free)
    node.remove("b")
    assert not node.arena.discarded, "what was freed is still there for the next"
    assert (chunks.resident[used]).all()
    node.remove("a")
    chunks.hold(25)  # so the next loads take chunks that have no memory yet
    node.load("d", reserved=9)
    node.load("e", reserved=9)
    assert np.count_nonzero(chunks.resident) <= 44
    assert not chunks.resident[list(node.arena.discarded)].any()


def test_weights_fill_gaps_and_reserved_kv_lies_together(node: Node) -> None:
    for name in "abcdef":
        node.load(name, reserved=4, lease=0)
    for name in "bdf":
        node.remove(name)
    spec = load_message(null_checkpoint(node.folder / "g"), "g", kv_reserved_chunks=8, weights_chunks=10, lease_chunks=0)
    place = node.models.take_place(spec)
    assert np.diff(place.kv).max() == 1
    assert len(np.unique(np.concatenate((place.kv, place.weights)))) == 18
    assert (np.diff(place.weights) > 1).any(), "the gaps that were left are used before the rest is cut up"
    node.models.give_up_place(place)
    assert np.count_nonzero(~node.models.chunks.free) == 3 * 8


def test_a_reservation_that_is_not_there(node: Node) -> None:
    with pytest.raises(MemoryError, match="65 reserved chunks"):
        node.load("a", reserved=65)
    assert node.models.by_name == {}
    assert node.models.chunks.free.all()
    node.load("b", reserved=60)


GEMMA = {
    "architectures": ["Gemma2ForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 1000,
    "max_position_embeddings": 4096,
    "sliding_window": 64,
}


def test_windows_bound_what_a_sequence_holds(node: Node, tmp_path: Path) -> None:
    """A window group keeps blocks for the window only. Two of four layers see 64 tokens, so of 1,000 tokens they keep these and one
    more block."""
    folder = tmp_path / "gemma"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(GEMMA))
    spec = load_message(str(folder), "w", kv_reserved_chunks=30, lease_chunks=8, max_model_len=1100)
    hosted = node.add(spec)
    assert [(group.window_tokens, group.layers) for group in hosted.kv_groups] == [(0, (1, 3)), (64, (0, 2))]
    node.submit("w", 1, 700, 390)
    held = []
    while node.step("w"):
        held.append(node.models.stats(node.steps).models["w"][0])
    block_bytes = hosted.kv_groups[0].block_bytes
    assert held[-2] == (1088 // 16 + 64 // 16 + 1) * block_bytes  # blocks of both groups have the same size
    assert max(held) == held[-2]
    assert node.models.stats(node.steps).models["w"][0] == 0
    node.remove("w")
    assert node.models.chunks.free.all()


def test_other_kv_groups_are_named(node: Node) -> None:
    hosted = node.load("a")
    spec = load_message("x", "other")
    place = node.models.take_place(spec)
    hosted.kv_groups = (KVGroupSpec("state", 16, 8192, (0, 1)),)
    with pytest.raises(ValueError, match=r"kind state with window_tokens 0; supported: full, window, chunked, latent, state"):
        node.models.make(spec, hosted, place)


class Captures:
    """A model with three step sizes left to capture."""

    name, num_uncaptured = "a", 3

    def capture_next(self) -> None:
        self.num_uncaptured -= 1


def test_a_model_without_idle_time_captures_between_its_steps_while_no_other_wants_the_device(tmp_path: Path) -> None:
    node = Node(tmp_path)
    for name in ("a", "b"):
        node.load(name)
    served, captures = node.models.by_name["a"], Captures()
    assert served.captures is None, "a null model has nothing to capture"
    served.captures = captures
    node.submit("a", 1, 20, max_tokens=500)

    def decode(num_steps: int) -> None:
        for _ in range(num_steps):
            plan = served.scheduler.plan(node.steps)
            assert plan is not None
            result = served.hosted.execute(plan, served.scheduler.table)
            served.scheduler.finish_step(plan, result.ids, result.bad)
            to_capture = node.models.to_capture_between(served, plan)
            if to_capture is not None:
                to_capture.capture_next()

    decode(1)
    assert served.num_decodes == 0, "that was its prompt"
    decode(CAPTURE_EVERY_DECODES - 1)
    assert captures.num_uncaptured == 3
    decode(1)
    assert captures.num_uncaptured == 2
    node.submit("b", 2, 20)
    decode(2 * CAPTURE_EVERY_DECODES)
    assert captures.num_uncaptured == 2, "another model waits for the device"
    node.run("b")
    decode(5 * CAPTURE_EVERY_DECODES)
    assert captures.num_uncaptured == 0
    captures.num_uncaptured, served.ahead = 3, cast(LaunchesAhead, served.hosted)
    decode(2 * CAPTURE_EVERY_DECODES)
    assert captures.num_uncaptured == 3, "a GPU's captures and measurements would delay the steps that are launched"


def test_a_model_keeps_within_its_turn_beside_streams_that_another_engine_leads(node: Node) -> None:
    node.load("a")
    served = node.models.by_name["a"]
    share = SimpleNamespace(has_sequences=False)
    node.models.followed["led elsewhere"] = cast(GroupShare, share)
    turns = []
    for share.has_sequences in (False, True, False):
        node.models.room_of(served, ["a"])
        turns.append(served.turns)
    assert turns == [0, 1, 0], "0: unlimited"
    share.has_sequences, served.backlogged = True, True
    node.models.room_of(served, ["a"])
    assert served.turns == 1, "what is led elsewhere pools no turns with a model of this engine"
