"""Models with sliding windows give the text of transformers under the batch scheduler. All memory that no sequence holds is filled
with NaN, so any wrong read shows.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.cpu.model import CpuModel
from engine.protocol import LoadModel, SamplingParams
from engine.serve.kv_caches import make_kv_cache, split_reserve
from scheduler.batch.batch_scheduler import BatchLimits, BatchScheduler
from scheduler.batch.chunk_pool import ChunkPool
from scheduler.batch.request import BatchRequest
from scheduler.batch.step_room import StepRoom
from tests.engine.cpu_ops import compute_with
from tests.engine.model_bench import BLOCK_TOKENS, CASES, MAX_LEN, load, make_checkpoint, make_memory, make_runner

NUM_CHUNKS, CHUNK_BYTES, BATCHED_TOKENS = 64, 4096, 24
COMMON_PROMPT = np.random.default_rng(1).integers(2, 211, 30).tolist()


def prompt_of(request_id: int) -> list[int]:
    """Returns a request's prompt. Prompts with odd ids share their beginning."""
    own = np.random.default_rng(request_id).integers(2, 211, 5 + 6 * request_id).tolist()
    return COMMON_PROMPT + own if request_id % 2 else own


class Node:
    """A model with its batch scheduler and memory."""

    def __init__(self, folder: Path, lease_chunks: int, use_kernels: bool = True) -> None:
        self.memory = make_memory(NUM_CHUNKS, CHUNK_BYTES)
        self.memory.arena.view(torch.float32).fill_(torch.nan)
        runner = compute_with(make_runner(self.memory), use_kernels)
        self.model: CpuModel = load(runner, folder, eos=())
        chunks = ChunkPool(NUM_CHUNKS, CHUNK_BYTES, lease_chunks)
        spec = LoadModel(1, "tiny", str(folder), "float32", "", 0, 20, lease_chunks, MAX_LEN, 8, [])
        self.kv = make_kv_cache(spec, self.model.kv_groups, chunks, BATCHED_TOKENS)
        self.scheduler = BatchScheduler("tiny", self.kv, BatchLimits(8, MAX_LEN, BATCHED_TOKENS, (), "f", "float32"))
        self.output: dict[int, list[int]] = {}
        self.cached: dict[int, int] = {}

    def submit(self, request_id: int, num: int) -> None:
        """Submits a request for `num` tokens, with its output so far if it was submitted before."""
        output = self.output.setdefault(request_id, [])
        tokens = np.array(prompt_of(request_id) + output, np.int32)
        self.scheduler.submit(BatchRequest(request_id, tokens, len(prompt_of(request_id)), SamplingParams(num, temperature=0.0)))

    def step(self, max_prompt_tokens: int | None = None) -> bool:
        plan = self.scheduler.plan(0, StepRoom(max_tokens=max_prompt_tokens))
        if plan is None:
            return False
        result = self.model.execute(plan, self.scheduler.table)
        outcome = self.scheduler.finish_step(plan, result.ids, result.bad)
        assert not outcome.bad, "it read what is not its own"
        for request_id, token in zip(outcome.request_ids, outcome.ids, strict=True):
            self.output[request_id].append(token)
        self.cached.update(outcome.cached)
        self.poison()
        return True

    def poison(self) -> None:
        """Fills all free blocks with NaN: those neither held by a sequence nor kept in the prefix cache."""
        for group, memory in zip(self.kv.groups, self.model._kv, strict=True):
            group.pool.check()
            memory.kv[group.pool._stack[: group.pool.num_free].astype(np.int64)] = torch.nan


@pytest.fixture(scope="module", params=["mistral-window", "qwen3-windows", "phi3-partial-window", "gemma2", "gemma3", "gemma4"])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """Returns a checkpoint's folder, and what gives transformers' text of a request, which is made once for both tests."""
    folder = tmp_path_factory.mktemp(request.param)
    model = make_checkpoint(folder, **CASES[request.param])

    @functools.cache
    def text_of(request_id: int, num: int) -> list[int]:
        tokens = prompt_of(request_id)
        with torch.inference_mode():
            whole = model.generate(torch.tensor([tokens]), max_new_tokens=num, do_sample=False, eos_token_id=None)
        text: list[int] = whole[0, len(tokens) :].tolist()
        return text

    return folder, text_of


@pytest.mark.parametrize("kernels", [True, False], ids=["kernels", "reference"])
def test_text_is_transformers_however_it_is_scheduled(made: tuple[Path, Any], kernels: bool) -> None:
    """The text stays right with chunked prefill, prefix hits, preemption and resubmission, all at once and in little memory."""
    node = Node(made[0], lease_chunks=6, use_kernels=kernels)
    try:
        for request_id in range(1, 6):
            node.submit(request_id, 50)
        for number in range(400):
            if number == 30:
                node.scheduler.preempt_one()
            if number == 40:
                assert node.scheduler.abort(1)
                node.submit(1, 50)
            if number == 60:
                node.submit(7, 30)
            if not node.step(7 if number % 3 else None) and number > 60:
                break
        assert not node.scheduler.failed
        assert node.scheduler.num_running == len(node.scheduler.waiting) == 0
        assert node.scheduler.num_preemptions > 0
        node.kv.chunks.set_lease(40)
        for request_id in (9, 11):  # one after the other, with memory to spare
            node.submit(request_id, 20)
            while node.step(7):
                pass
        assert node.cached[11] == len(COMMON_PROMPT) // BLOCK_TOKENS * BLOCK_TOKENS
        for request_id, num in {1: 50, 2: 50, 3: 50, 4: 50, 5: 50, 7: 30, 9: 20, 11: 20}.items():
            assert node.output[request_id] == made[1](request_id, num)
        assert node.kv.held_bytes == 0
    finally:
        node.model.release()


def test_reserves_are_split_by_need() -> None:
    assert split_reserve(10, [5, 3]) == [7, 3]
    assert split_reserve(4, [6, 2]) == [3, 1]
    assert split_reserve(0, [6, 2]) == [0, 0]
    assert split_reserve(9, [4]) == [9]
