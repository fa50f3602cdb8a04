"""States of the gated delta rule under the batch scheduler: whatever happens to a sequence, its text is transformers', and a state
that was saved and restored continues bit by bit as the one that was not.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.cpu.model import CpuModel
from engine.memory.arena import copy_pieces
from engine.protocol import SamplingParams
from engine.serve.kv_caches import make_kv_cache
from scheduler.batch import kv_saving
from scheduler.batch.batch_scheduler import BatchLimits, BatchScheduler
from scheduler.batch.chunk_pool import ChunkPool
from scheduler.batch.compaction import Compaction
from scheduler.batch.request import BatchRequest
from scheduler.batch.step_room import StepRoom
from tests.engine.cpu_ops import compute_with
from tests.engine.model_bench import (
    CASES,
    CHUNK_BYTES,
    MAX_LEN,
    NUM_CHUNKS,
    load,
    make_checkpoint,
    make_memory,
    make_runner,
    make_table,
    plan,
    put,
)

PROMPT = np.random.default_rng(11).integers(2, 211, 60).tolist()
MAX_TOKENS, BUDGET = 24, 24


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("qwen3-next")
    return folder, make_checkpoint(folder, **CASES["qwen3-next"])


@pytest.fixture
def model(made: tuple[Path, Any]) -> Iterator[CpuModel]:
    model = load(compute_with(make_runner(make_memory()), use_kernels=True), made[0])
    yield model
    model.release()


def text_after(made: tuple[Path, Any], prompt: list[int]) -> list[int]:
    with torch.inference_mode():
        ids = made[1].generate(torch.tensor([prompt]), max_new_tokens=MAX_TOKENS, do_sample=False, eos_token_id=None)
    output: list[int] = ids[0, len(prompt) :].tolist()
    return output


class Served:
    """A batch scheduler over the model's own arena. Prompts leave a state behind at every 16 tokens."""

    def __init__(self, model: CpuModel, reserved: int = 40, lease: int = 20, first_chunk: int = 0) -> None:
        self.model = model
        spec: Any = type("Spec", (), {"model": "m", "max_model_len": MAX_LEN, "kv_reserved_chunks": reserved})
        groups = [replace(group, snapshot_tokens=16 if group.snapshot_tokens else 0) for group in model.kv_groups]
        self.chunks = ChunkPool(NUM_CHUNKS, CHUNK_BYTES, lease)
        if first_chunk:  # those before it are another cache's
            self.chunks.take(np.arange(first_chunk, dtype=np.int32), reserved=True)
        self.kv = make_kv_cache(spec, groups, self.chunks, BUDGET)
        limits = BatchLimits(4, MAX_LEN, BUDGET, (), "f", "float32")
        self.scheduler = BatchScheduler("m", self.kv, limits)
        self.arena = torch.empty(0, dtype=torch.uint8).set_(model._kv[0].kv.untyped_storage())
        self.compaction = Compaction(lambda size, sources, targets: copy_pieces(self.arena, size, sources, targets))
        self.output: dict[int, list[int]] = {}
        self.cached: dict[int, int] = {}

    def submit(self, request_id: int, prompt: list[int], output: tuple[int, ...] = ()) -> None:
        self.output[request_id] = list(output)
        params = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True)
        self.scheduler.submit(BatchRequest(request_id, np.array([*prompt, *output], np.int32), len(prompt), params))

    def step(self, tokens: int = BUDGET) -> bool:
        plan = self.scheduler.plan(0, StepRoom(max_tokens=tokens))
        if plan is None:
            return False
        result = self.model.execute(plan, self.scheduler.table)
        assert not result.bad.any()
        outcome = self.scheduler.finish_step(plan, result.ids, result.bad)
        for request_id, token in zip(outcome.request_ids, outcome.ids, strict=True):
            self.output[request_id].append(token)
        self.cached.update(outcome.cached)
        return True

    def states(self, slot: int = 0) -> np.ndarray:
        """The state of a slot after its last computed token."""
        at = (int(self.scheduler.table.num_computed[slot]) - 1) // self.kv.block_tokens
        kept: np.ndarray = self.model._kv[1].kv[self.scheduler.table.block_tables[1][slot, at]].numpy().copy()
        return kept


def test_texts_are_transformers_whatever_happens(model: CpuModel, made: tuple[Path, Any]) -> None:
    """With chunks of any size, prefixes in common, preemptions and moved blocks."""
    served = Served(model)
    prompts = {1: PROMPT, 2: PROMPT, 3: [*PROMPT[:40], *PROMPT[:13]], 4: PROMPT[:33], 5: PROMPT[7:26]}
    served.submit(1, prompts[1])
    for at in range(60):
        if at == 9:
            for request_id in (2, 3, 4, 5):
                served.submit(request_id, prompts[request_id])
        served.step(5 + at % 17)
        if at % 11 == 10:
            served.scheduler.preempt_one()
        if at % 7 == 6:
            served.compaction.gather(served.scheduler, 3)
    while served.step():
        pass
    assert {request_id: served.cached[request_id] for request_id in (2, 3, 4)} == {2: 56, 3: 36, 4: 32}  # 36: where a chunk ended
    assert served.scheduler.num_preemptions > 2
    for request_id, prompt in prompts.items():
        assert served.output[request_id] == text_after(made, prompt), request_id
    assert served.kv.held_bytes == 0


def test_a_checkpoint_in_three_files_is_the_same(model: CpuModel, made: tuple[Path, Any], tmp_path: Path) -> None:
    made[1].save_pretrained(tmp_path, max_shard_size="200KB")
    assert len(list(tmp_path.glob("*.safetensors"))) == 3
    sharded = load(compute_with(make_runner(make_memory()), use_kernels=True), tmp_path)
    found = []
    for one in (model, sharded):
        table = make_table(groups=one.kv_groups)
        put(table, 0, PROMPT)
        found.append(one.logits(plan((0, 0, 60)), table, every_token=True))
    sharded.release()
    assert np.array_equal(*found)


def test_a_restored_state_continues_bit_by_bit(model: CpuModel, made: tuple[Path, Any]) -> None:
    served = Served(model, reserved=20, lease=0)
    served.submit(1, PROMPT)
    for _ in range(3 + 10):
        served.step()
    assert int(served.scheduler.table.num_computed[0]) % served.kv.block_tokens, "in the middle of a block"
    saved = kv_saving.select(served.scheduler, 1 << 30)
    other = Served(model, reserved=20, lease=0, first_chunk=30)
    blocks = kv_saving.make_room(other.kv, saved.blocks >= 0)
    for g, group in enumerate(other.kv.groups):
        there = saved.blocks[:, g] >= 0
        copy_pieces(other.arena, group.block_bytes, saved.blocks[there, g], blocks[there, g])
    kv_saving.take_back(other.kv, saved.keys, saved.num_tokens, blocks, np.ones(len(blocks), np.bool_))
    other.submit(1, PROMPT, tuple(served.output[1]))
    other.step()
    assert saved.num_lost_tokens == 0
    served.step()
    assert np.array_equal(served.states(), other.states())
    assert int(other.scheduler.table.num_computed[0]) == int(served.scheduler.table.num_computed[0])
    while other.step():
        pass
    assert other.output[1] == text_after(made, PROMPT)
