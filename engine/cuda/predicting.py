"""Drafts tokens with a model's predictor on a GPU, after each step and from the states that the step left on the device.

Everything is launched right after the step, before the step's tokens are known. The device finds by itself the tokens that follow,
which row sampled each sequence's newest token, and so where its drafts begin: the host sends the columns that each row would need,
and the device picks.

Shapes: R rows of the step, T its tokens, N sampling rows, Q sequences that sample, W width, K drafted tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.contracts.steps import Launched, Proposed, StepResult
from engine.cuda.batch import DeviceBatch
from engine.cuda.columns import SETTINGS, Columns, ExtendStep, extend_step, sampling_columns
from engine.cuda.kernels import entry
from engine.cuda.sequences import ALIGN_WORDS, Staging
from engine.models.registry import CausalLM
from engine.sampling.proposing import following_tokens, sampled_sequences
from engine.sampling.sampler import plain_rows
from loader.gpu_sizing import LOGITS_ROWS
from scheduler.batch.plan import BatchPlan, IntArray, SequenceTable

DRAFT_COLUMNS = ("slots", "firsts", "contexts", *SETTINGS)  # columns of a row that reads a drafted token and samples the next
FLOAT_COLUMNS = {"temperature", "top_p", "min_p"}


class CudaPredicting:
    """Shows the steps of one model to its predictor, and lets it draft tokens. model: the loaded model. batch: makes the inputs of
    a forward pass from columns on the device. num_slots: S, the slot of no sequence. tile_tokens: as in extend_step."""

    def __init__(
        self,
        model: Callable[[], CausalLM[DeviceBatch]],
        batch: Callable[[Mapping[str, Tensor], ExtendStep | None], DeviceBatch],
        staging: Staging,
        device: torch.device,
        num_slots: int,
        tile_tokens: int,
    ) -> None:
        self._model, self._batch, self._staging, self._device = model, batch, staging, device
        self._num_slots, self._tile_tokens = num_slots, tile_tokens

    def after(self, plan: BatchPlan, table: SequenceTable, kept: Sequence[Tensor], ids: Tensor) -> PendingProposals:
        """Starts to show the predictor a step that was launched, and to draft as many tokens behind each sequence that samples as
        the plan says. kept [>= T, W] each: what the step kept for it. ids [N] int32: what it samples. Stores the predictor's keys
        and values of all the step's tokens, and of those that are drafted but the last.

        Drafts are sampled like the model's own tokens, with the noise of their positions, so that the model will pick the same
        tokens wherever the predictor's distribution is close to its own."""
        assert plan.to_propose is not None
        began = self._mark()
        step = extend_step(plan, table, self._tile_tokens, None)
        sent = self._staging.send(step.columns | {"host_ids": following_tokens(plan, table)})
        if step.num_sampling:
            entry.set_entries(sent["host_ids"], sent["wanted"], ids)
        states = self.see([one[: len(sent["host_ids"])] for one in kept], sent, step)
        seen, counts = self._mark(), plan.to_propose[plan.samples]
        told = self._drafted(plan, table, states, ids, counts)
        if self._device.type == "cuda":
            on_host = torch.empty(told.shape, dtype=told.dtype, pin_memory=True)
            told = on_host.copy_(told, non_blocking=True)
        return PendingProposals(plan.slots[plan.samples], counts, told, (began, seen, self._mark()))

    def see(self, kept: Sequence[Tensor], sent: dict[str, Tensor], step: ExtendStep) -> Tensor:
        """Returns the predictor's states [N, W] of the tokens that the step samples from. kept [T, W] each: of the model. sent: the
        step's columns, with the tokens that follow as host_ids."""
        model = self._model()
        return model.predict(model.read(kept), self._batch(sent, step)).index_select(0, sent["wanted"])

    def _drafted(self, plan: BatchPlan, table: SequenceTable, states: Tensor, ids: Tensor, counts: IntArray) -> Tensor:
        """Returns [1 + K, Q] int32 on the device: which of the N rows sampled each sequence's newest token, then the drafted
        tokens. states [N, W]: of the sampling rows. counts [N]: how many tokens to draft behind each of them, if it is the
        newest."""
        sequences, num_drafted = sampled_sequences(plan, table), int(counts.max(initial=0))
        num = len(sequences.firsts)
        missing = -num % ALIGN_WORDS  # picked columns are aligned as those that are sent, and kernels are compiled for that
        columns: Columns = {
            "firsts": np.pad(sequences.firsts, (0, missing)).astype(np.int32),
            "rows": np.pad(sequences.rows, ((0, missing), (0, 0))).astype(np.int32).reshape(-1),
            "expected": np.pad(sequences.expected, ((0, missing), (0, 0)), constant_values=-1).reshape(-1),
            "numbers": np.arange(num, dtype=np.int32),
            "drafts": self._columns(plan, table, counts, num_drafted),
        }
        sent = self._staging.send(columns)
        newest = sent["firsts"]
        if len(sent["rows"]):
            agrees = ids.index_select(0, sent["rows"]).eq(sent["expected"]).view(num + missing, -1)
            newest = newest + agrees.cumprod(1).sum(1)
        told = torch.empty(1 + num_drafted, num, dtype=torch.int32, device=self._device)
        told[0] = newest[:num]
        if not num_drafted:
            return told
        size = (num_drafted, len(DRAFT_COLUMNS))
        picked = sent["drafts"].view(size[0] * size[1], len(ids)).index_select(1, newest).view(*size, num + missing)
        states, drawn = states.index_select(0, newest[:num]), ids
        for number in range(num_drafted):
            own = {name: picked[number, at, :num] for at, name in enumerate(DRAFT_COLUMNS)}
            own |= {name: own[name].view(torch.float32) for name in FLOAT_COLUMNS}
            if number:  # the token drafted last is the next one to read
                states = self.go_on(states, own | {"numbers": sent["numbers"], "host_ids": drawn})
            drawn = self.draw(states, own)
            told[1 + number] = drawn
        return told

    def _columns(self, plan: BatchPlan, table: SequenceTable, counts: IntArray, num_drafted: int) -> IntArray:
        """Returns DRAFT_COLUMNS of each sampling row, [K, C, N] in one, as if it were its sequence's newest. Rows behind which
        fewer tokens are drafted belong to no sequence in the steps that are too many for them."""
        slots, computed = plan.slots[plan.samples], (plan.num_computed + plan.num_new)[plan.samples]
        out = np.zeros((num_drafted, len(DRAFT_COLUMNS), len(slots)), np.int32)
        for number in range(num_drafted):
            going = counts > number
            own: Columns = {
                "slots": np.where(going, slots, self._num_slots),
                "firsts": np.where(going, computed + number - 1, 0),
                "contexts": np.where(going, computed + number, 0),
            }
            own = {name: column.astype(np.int32) for name, column in own.items()}
            own |= sampling_columns(plain_rows(table, slots, computed + np.int32(number + 1)))
            for at, name in enumerate(DRAFT_COLUMNS):
                out[number, at] = own[name].view(np.int32)
        return out.reshape(-1)

    def go_on(self, states: Tensor, columns: Mapping[str, Tensor]) -> Tensor:
        """Returns the predictor's hidden states [Q, W] of one more token of each row, from those of the token before. columns: as
        of a decode step, host_ids: the tokens to read."""
        return self._model().predict(states, self._batch(columns, None))

    def draw(self, states: Tensor, columns: Mapping[str, Tensor]) -> Tensor:
        """Returns the tokens [Q] int32 that are sampled by the settings in columns from what the predictor made of states [Q,
        W]."""
        drawn = torch.empty(2, len(states), dtype=torch.int32, device=self._device)
        for first in range(0, len(states), LOGITS_ROWS):
            part = slice(first, first + LOGITS_ROWS)
            logits = self._model().predicted_logits(states[part])
            entry.sample(logits, [columns[name][part] for name in SETTINGS], drawn[0, part], drawn[1, part])
        return drawn[0]

    def _mark(self) -> Any:
        """Returns a point in the device's time: an event, or, where kernels are interpreted, the host's seconds."""
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True, blocking=True)
        event.record()
        return event


@dataclass(slots=True, frozen=True)
class PendingProposals:
    """Drafts that are under way. slots, counts [N]: slots of the step's sampling rows, and how many tokens to draft. told [1 + K,
    Q]: on the host, for each sequence the row after which its drafts come, then the drafts. marks: events before the predictor sees
    the step, after that, and after its drafts."""

    slots: IntArray
    counts: IntArray
    told: Tensor
    marks: tuple[Any, Any, Any]

    def wait(self) -> Proposed:
        began, seen, done = self.marks
        if isinstance(done, float):
            seconds = seen - began, done - seen
        else:
            done.synchronize()
            seconds = began.elapsed_time(seen) / 1e3, seen.elapsed_time(done) / 1e3
        told = self.told.numpy()
        return Proposed(self.slots[told[0]], self.counts[told[0]], told[1:].T.copy(), *seconds)


class WithProposals:
    """A launched step, and the drafts after it."""

    def __init__(self, step: Launched, proposals: PendingProposals) -> None:
        self._step, self._proposals = step, proposals

    def wait(self) -> StepResult:
        result = self._step.wait()
        result.proposed = self._proposals.wait()
        return result
