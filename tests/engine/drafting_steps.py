"""Steps with drafts, on any device: those behind which a model's predictor drafts, which must be the drafts of transformers' parts,
and whole texts of requests that run together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from engine.contracts.steps import StepResult
from engine.cpu.model import CpuModel
from engine.protocol import LoadModel, SamplingParams
from engine.serve.kv_caches import make_kv_cache
from scheduler.batch.batch_scheduler import BatchLimits, BatchScheduler
from scheduler.batch.chunk_pool import ChunkPool
from scheduler.batch.drafting import Drafter
from scheduler.batch.plan import BatchPlan, write_sampling
from scheduler.batch.request import BatchRequest
from scheduler.batch.step_room import StepRoom
from tests.engine.eagle_checkpoint import EagleReference
from tests.engine.model_bench import BLOCK_TOKENS, MAX_LEN, make_table, plan, put
from tests.engine.predictor_checkpoint import Reference

NUM_CHUNKS, CHUNK_BYTES, BATCHED_TOKENS, VOCAB = 64, 4096, 24, 211
NOBODYS = 0  # a slot of no sequence; its first block is in block tables behind those that a sequence has


def prompt_of(request_id: int) -> list[int]:
    prompt: list[int] = np.random.default_rng(request_id).integers(2, VOCAB, 5 + 4 * request_id).tolist()
    return prompt


def texts_of(
    model: Any, requests: Mapping[int, SamplingParams], drafter: Drafter | None, speculator: str = "none"
) -> tuple[dict[int, list[int]], int]:
    """Returns the outputs of requests, which run together, with a preemption on the way, and how many tokens were drafted. All
    memory that no sequence holds is filled with NaN. model: of either device. drafter: what drafts before a step. speculator: what
    the model drafts with behind a step."""
    spec = LoadModel(1, "tiny", "", "float32", "", 0, 30, 20, MAX_LEN, 8, [], speculator=speculator)
    kv = make_kv_cache(spec, model.kv_groups, ChunkPool(NUM_CHUNKS, CHUNK_BYTES, 20), BATCHED_TOKENS)
    limits = BatchLimits(8, MAX_LEN, BATCHED_TOKENS, (), "f", "float32")
    scheduler = BatchScheduler("tiny", kv, limits, drafter, spec.predicts)
    output: dict[int, list[int]] = {request_id: [] for request_id in requests}
    for request_id, params in requests.items():
        tokens = np.array(prompt_of(request_id), np.int32)
        scheduler.submit(BatchRequest(request_id, tokens, len(tokens), params))
    num_drafted = steps = 0
    while (step := scheduler.plan(steps, StepRoom(max_tokens=9 if steps % 3 else None))) is not None:
        steps += 1
        result = model.execute(step, scheduler.table)
        outcome = scheduler.finish_step(step, result.ids, result.bad)
        assert not outcome.bad, "it read what is not its own"
        if result.proposed is not None:
            scheduler.take_proposals(result.proposed.slots, result.proposed.counts, result.proposed.tokens)
        told = iter(outcome.ids)
        for request_id, count in zip(outcome.request_ids, outcome.counts or [1] * len(outcome.ids), strict=True):
            output[request_id] += [next(told) for _ in range(count)]
        num_drafted += sum(outcome.drafted)
        if steps == 12:
            scheduler.preempt_one()
        for group, held in zip(kv.groups, _kv_of(model), strict=True):
            held[group.pool._stack[: group.pool.num_free].astype(np.int64)] = torch.nan
    return output, num_drafted


def _kv_of(model: Any) -> list[torch.Tensor]:
    return [memory.kv for memory in (model._kv if isinstance(model, CpuModel) else model._memory)]


class DraftingSteps:
    """Runs steps of two sequences, and checks the drafts behind each, in memory filled with NaN. model: of either device.
    edited: a slot whose logits the host edits, though they stay as they are; None: the device samples for all rows."""

    def __init__(
        self, model: Any, reference: Reference | EagleReference, texts: dict[int, list[int]], edited: int | None = None
    ) -> None:
        self._model, self._reference = model, reference
        self.texts = {slot: list(text) for slot, text in texts.items()}
        self.table = make_table(groups=model.kv_groups)
        self._own = [block_table.copy() for block_table in self.table.block_tables]
        self._kv = _kv_of(model)
        for kv, own in zip(self._kv, self._own, strict=True):
            kv[own.reshape(-1)] = torch.nan
        self._held: dict[int, int] = {}  # blocks of each slot that were ever its own
        for slot, text in self.texts.items():
            put(self.table, slot, text)
            self._held[slot] = 0
            params = SamplingParams(90, temperature=0.0, logit_bias={7: 0.0} if slot == edited else {})
            write_sampling(self.table, slot, params, len(text), MAX_LEN)

    def run(self, step: BatchPlan, asked: dict[int, int]) -> StepResult:
        """Runs a step after which asked[slot] tokens are drafted for each slot that samples. Slots have no block more than that
        takes."""
        to_propose = step.num_new * 0
        for row, (slot, samples) in enumerate(zip(step.slots.tolist(), step.samples.tolist(), strict=True)):
            to_propose[row] = asked[slot] if samples else 0
        ends = step.num_computed + step.num_new + (to_propose - 1).clip(0)
        for slot, end in zip(step.slots.tolist(), ends.tolist(), strict=True):
            self._held[slot] = max(self._held[slot], -(-end // BLOCK_TOKENS))
        for block_table, own in zip(self.table.block_tables, self._own, strict=True):
            block_table[:] = own[NOBODYS, 0]
            for slot, held in self._held.items():
                block_table[slot, :held] = own[slot, :held]
        result: StepResult = self._model.execute(replace(step, to_propose=to_propose), self.table)
        assert not result.bad.any()
        return result

    def go_on(self, *rows: tuple[int, int, int], samples: tuple[bool, ...] | None = None, asked: dict[int, int]) -> None:
        step = plan(*rows, samples=samples)
        step = replace(step, all_decode=bool(step.samples.all() and (step.num_new == 1).all()))
        result = self.run(step, asked)
        self._check(result, dict(zip(step.slots[step.samples].tolist(), result.ids.tolist(), strict=True)), asked)

    def verify(self, drafts: dict[int, list[int]], asked: dict[int, int]) -> dict[int, int]:
        """Runs a step with tokens that were drafted behind the sequences. Returns how many of each held."""
        rows = []
        for slot, drafted in drafts.items():
            text = self.texts[slot]
            self.table.tokens[slot, len(text) : len(text) + len(drafted)] = drafted
            rows += [(slot, len(text) - 1 + at, 1) for at in range(len(drafted) + 1)]
        result = self.run(replace(plan(*rows), all_decode=True, drafted=True), asked)
        held, newest, ids = {}, {}, iter(result.ids.tolist())
        for slot, drafted in drafts.items():
            sampled = [next(ids) for _ in range(len(drafted) + 1)]
            agrees = [one == other for one, other in zip(drafted, sampled, strict=False)]
            held[slot] = (*agrees, False).index(False)
            newest[slot] = sampled[held[slot]]
            self.texts[slot] += drafted[: held[slot]]
        self._check(result, newest, asked)
        return held

    def next_token(self, slot: int) -> int:
        """Returns what transformers' model expects after a sequence."""
        with torch.inference_mode():
            return int(self._reference.model(torch.tensor([self.texts[slot]])).logits[0, -1].argmax())

    def _check(self, result: StepResult, sampled: dict[int, int], asked: dict[int, int]) -> None:
        """Checks what was drafted behind the newest token of each sequence, sampled[slot]."""
        for slot, token in sampled.items():
            assert token == self.next_token(slot)
            self.texts[slot].append(token)
            put(self.table, slot, self.texts[slot])
        proposed = result.proposed
        assert proposed is not None
        assert proposed.seen_s > 0.0
        assert sorted(proposed.slots.tolist()) == sorted(sampled)
        for slot, count, drafted in zip(proposed.slots.tolist(), proposed.counts.tolist(), proposed.tokens, strict=True):
            assert count == asked[slot]
            assert not count or drafted[:count].tolist() == self._reference.drafts(self.texts[slot], count)[0]
        for kv, own in zip(self._kv, self._own, strict=True):
            untouched = kv[own.reshape(-1)].isnan().flatten(1).all(dim=1).view(own.shape).cpu().numpy()
            for slot, blocks in enumerate(untouched):
                assert blocks[self._held.get(slot, 0) :].all(), "keys and values were stored in a block that is not the sequence's"


def check_drafts(model: Any, reference: Reference | EagleReference, texts: dict[int, list[int]], edited: int | None = None) -> None:
    """Runs a step with a whole prompt and a part of one, one with its other part, and decode steps with and without drafts, of
    which one holds and one does not. texts: two, by slot, in order."""
    steps = DraftingSteps(model, reference, texts, edited)
    one, other = texts
    first, second = (len(text) for text in texts.values())
    steps.go_on((one, 0, first), (other, 0, second - 3), samples=(True, False), asked={one: 2, other: 0})
    steps.go_on((one, first, 1), (other, second - 3, 3), asked={one: 3, other: 1})
    steps.go_on((one, first + 1, 1), (other, second, 1), asked={one: 0, other: 2})
    right, wrong = steps.next_token(one), (steps.next_token(other) + 1) % 211
    held = steps.verify({one: [right, 5, 6], other: [wrong]}, asked={one: 2, other: 3})
    assert held[one] >= 1
    assert held[other] == 0
