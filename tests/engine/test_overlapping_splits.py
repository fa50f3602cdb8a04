"""Models that are split over overlapping pairs of real engines, and a whole one between them: what they say is what whole ones say
alone, in whatever order requests, evictions and loads come."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from engine.protocol import Abort, Configure, SetLease
from loader.models.catalog import scan_one
from loader.shapes import kv_layout
from loader.sizes.work_space import handed_bytes
from tests.e2e.checkpoints import END_ID, make_model
from tests.engine.engine_process import submit_message
from tests.engine.group_engines import LEASE, Engines
from tests.engine.said import ASKED
from tests.kernel_cache import CACHE_DIR

LIMITS: dict[str, Any] = {
    "max_model_len": 256,
    "max_sequences": 8,
    "eos_token_ids": [END_ID],
    "weights_chunks": 16,
    "kv_reserved_chunks": 16,
}
# Requests that are under way for many steps, beside those that take other roads through a leader.
LONG: dict[str, dict[str, Any]] = {
    "long": {"temperature": 0.0, "max_tokens": 150, "ignore_eos": True},
    "long and sampled": {"temperature": 0.7, "max_tokens": 120, "ignore_eos": True, "prompt": [9, 8, 7, 6]},
}
OF_ALL = {**ASKED, **LONG}
NUM_TURNS, ASKED_A_TURN = 14, 6
STEP_TOKENS = 64
FEW_CHUNKS = 2  # a lease in which few sequences of a whole model have room: others are preempted


@dataclass
class Placed:
    """A model and the engines that hold it, of which the first leads."""

    path: str
    members: list[int]
    num_stages: int = 1


@dataclass
class Open:
    """A request that has not ended. had: tokens that it got from where it was before."""

    model: str
    what: str
    number: int
    request_id: int
    had: list[int] = field(default_factory=list)


class Pairs:
    """Three engines, the models that they hold, and what these say alone."""

    def __init__(self, folder: Path) -> None:
        configure = Configure("cpu:0", 176, 64 << 10, 1 << 20, STEP_TOKENS, 16, 10.0, 1, cache_dir=CACHE_DIR)
        delta: dict[str, Any] = {
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 4,
        }
        states: dict[str, Any] = {"architecture": "Qwen3_5ForCausalLM", "model_type": "qwen3_5_text", **delta}
        states["layer_types"] = ["linear_attention", "full_attention"]
        windows: dict[str, Any] = {"architecture": "Gemma2ForCausalLM", "model_type": "gemma2", "sliding_window": 24}
        windows |= {"query_pre_attn_scalar": 16, "hidden_activation": "gelu_pytorch_tanh", "num_layers": 4}
        plain = str(make_model(folder / "plain", seed=1, hidden_size=64))
        of_windows = str(make_model(folder / "windows", seed=2, hidden_size=64, **windows))
        of_states = str(make_model(folder / "states", seed=3, **states))
        self.placed = {
            "tensor": Placed(plain, [0, 1]),
            "stages": Placed(of_windows, [1, 2], num_stages=2),
            "other tensor": Placed(of_windows, [2, 1]),
            "ring": Placed(of_states, [2, 0]),
            "own": Placed(plain, [1]),
        }
        self.engines = Engines(3, configure, **LIMITS)
        self.told: dict[str, dict[str, list[int]]] = {}

    def ask_alone(self) -> None:
        for path in {placed.path: None for placed in self.placed.values()}:
            self.told[path] = self._alone(path)

    def _alone(self, path: str) -> dict[str, list[int]]:
        """Returns what a model that no other disturbs answers to each request."""
        alone = Placed(path, [0])
        self.placed["alone"] = alone
        self.load("alone")
        asked = {what: self.ask("alone", what) for what in OF_ALL}
        told = {what: self.tokens(one) for what, one in asked.items()}
        self.evict("alone", [0])
        del self.placed["alone"]
        return told

    def load(self, model: str) -> None:
        placed = self.placed[model]
        checkpoint = scan_one(Path(placed.path))
        assert checkpoint.shape is not None
        how: dict[str, Any] = {"fingerprint": checkpoint.fingerprint, "speculator": "prompt-lookup"}
        if len(placed.members) == 1:
            self.engines.load_alone(placed.path, model, placed.members[0], **how)
            return
        how["num_kv_groups"] = len(kv_layout.kv_groups(checkpoint.shape, "float32", 16))
        how["handed_bytes"] = handed_bytes(checkpoint.shape, "float32", STEP_TOKENS)
        self.engines.load(placed.path, model, placed.members, num_stages=placed.num_stages, **how)

    def evict(self, model: str, order: list[int], pause_s: float = 0.0) -> None:
        """Evicts a model from its engines in this order."""
        if len(order) == 1:
            self.engines.evict_alone(model, order[0])
        else:
            self.engines.evict(model, order, pause_s)

    def ask(self, model: str, what: str, had: list[int] | None = None) -> Open:
        """Sends a request. had: what it has got already where it was before."""
        self.engines.request_id += 1
        number = self.placed[model].members[0]
        settings = {"seed": 3, "prompt": [5, 6, 7], **OF_ALL[what]}
        self.engines.all[number].send(submit_message(self.engines.request_id, model, **settings, output=had or []))
        return Open(model, what, number, self.engines.request_id, had or [])

    def tokens(self, one: Open, wait: bool = True) -> list[int]:
        """Returns all tokens of a request; wait: once it has ended."""
        engine = self.engines.all[one.number]
        if wait:
            engine.wait_finished(one.request_id)
        return one.had + engine.output().get(one.request_id, [])

    def check(self, one: Open) -> None:
        assert self.tokens(one) == self.told[self.placed[one.model].path][one.what], (one.model, one.what)

    def again(self, one: Open) -> Open:
        """Sends a request that an eviction has ended once more, with what it has got, as the daemon does."""
        if one.request_id in self.engines.all[one.number].finished():
            return one
        return self.ask(one.model, one.what, self.tokens(one, wait=False))


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pairs]:
    made = Pairs(tmp_path_factory.mktemp("overlapping"))
    try:
        made.ask_alone()
        yield made
    finally:
        made.engines.close()


@pytest.mark.parametrize("seed", [1, 2])
def test_models_over_overlapping_pairs_say_what_they_say_alone(pairs: Pairs, seed: int) -> None:
    """Requests, aborts, evictions in the middle of streams, loads under another leader, and small leases, in a drawn order."""
    choose, engines = random.Random(seed), pairs.engines
    for model in pairs.placed:
        pairs.load(model)
    streams: list[Open] = []
    num_moved = 0
    for _ in range(NUM_TURNS):
        streams += [pairs.ask(choose.choice([*pairs.placed]), choose.choice([*OF_ALL])) for _ in range(ASKED_A_TURN)]
        time.sleep(choose.random() * 0.03)
        match choose.choice(["move", "move", "move", "abort", "lease"]):
            case "move":
                model = choose.choice([*pairs.placed])
                placed = pairs.placed[model]
                order = choose.sample(placed.members, len(placed.members))
                if len(order) > 1 and choose.random() < 0.5:  # as the daemon does first
                    engines.node.exchange.break_group(engines.groups[model][1][0])
                pairs.evict(model, order, pause_s=choose.choice([0.0, 0.002]))
                placed.members = choose.sample(placed.members, len(placed.members))
                pairs.load(model)
                after = [pairs.again(one) if one.model == model else one for one in streams]
                num_moved += sum(new is not old for new, old in zip(after, streams, strict=True))
                streams = after
            case "abort":
                one = streams.pop(choose.randrange(len(streams)))
                engines.all[one.number].send(Abort([one.request_id]))
            case "lease":
                number = choose.randrange(3)
                engines.all[number].send(SetLease(FEW_CHUNKS))
                time.sleep(choose.random() * 0.01)
                engines.all[number].send(SetLease(LEASE))
        while len(streams) > 3 * ASKED_A_TURN:
            pairs.check(streams.pop(choose.randrange(len(streams))))
    for one in streams:
        pairs.check(one)
    for model, placed in pairs.placed.items():
        pairs.evict(model, placed.members)
    assert num_moved, "no request was under way when its model was evicted"
