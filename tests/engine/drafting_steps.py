"""Steps behind which a model's predictor drafts, and whose drafts must be those of transformers' parts, on any device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from engine.contracts.steps import StepResult
from engine.cpu.model import CpuModel
from engine.protocol import SamplingParams
from scheduler.batch.plan import BatchPlan, write_sampling
from tests.engine.eagle_checkpoint import EagleReference
from tests.engine.model_bench import BLOCK_TOKENS, MAX_LEN, make_table, plan, put
from tests.engine.predictor_checkpoint import Reference

NOBODYS = 0  # a slot of no sequence; its first block is in block tables behind those that a sequence has


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
        self._kv = [memory.kv for memory in (model._kv if isinstance(model, CpuModel) else model._memory)]
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
