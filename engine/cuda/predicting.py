"""Drafts tokens with a model's predictor on a GPU, after each step and from the states that the step left on the device.

Everything is launched right after the step, before the host knows the step's tokens. Nor does the host know how many drafted tokens
of a sequence are accepted, and so after which row its next drafts begin. It sends the columns that a draft after each row would
need, and the device picks those of the row that sampled the sequence's newest token.

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
from loader.sizes.gpu_sizing import LOGITS_ROWS
from scheduler.batch.plan import BatchPlan, IntArray, SequenceTable

DRAFT_COLUMNS = ("slots", "firsts", "contexts", *SETTINGS)  # columns of a row that reads a drafted token and samples the next
FLOAT_COLUMNS = {"temperature", "top_p", "min_p"}


class CudaPredicting:
    """Runs a model's predictor behind the model's steps: the predictor reads each step and drafts tokens. model: returns the loaded
    model. batch: makes the inputs of a forward pass from columns on the device. num_slots: S, the slot of no sequence. tile_tokens:
    as in extend_step."""

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
        """Launches the predictor on a step that was just launched, and then on as many tokens as the plan asks it to draft for each
        sequence that samples. kept [>= T, W] each: what the step kept for the predictor. ids [N] int32: the tokens that it samples.
        The predictor's keys and values are stored for all tokens of the step, and for the drafted ones but the last.

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
        """Runs the predictor on a step's tokens. Returns its states [N, W] of the tokens that the step samples from. kept [T, W]
        each: the model's states that the step kept. sent: the step's columns on the device, in which host_ids [T] are the tokens
        that follow."""
        model = self._model()
        return model.predict(model.read(kept), self._batch(sent, step)).index_select(0, sent["wanted"])

    def _drafted(self, plan: BatchPlan, table: SequenceTable, states: Tensor, ids: Tensor, counts: IntArray) -> Tensor:
        """Returns [1 + K, Q] int32 on the device: for each sequence, the index of the sampling row with its newest token, then its
        drafted tokens. states [N, W]: the predictor's, of the sampling rows. ids [N]: the tokens that these rows sample. counts
        [N]: how many tokens to draft after each row, if it turns out to have the newest token."""
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
        """Returns the columns DRAFT_COLUMNS (C of them) of K draft steps, as [K, C, N] in one dimension: what each sampling row
        needs if it has its sequence's newest token. A row after which fewer than K tokens are drafted has slot S in the remaining
        steps."""
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
        """Runs the predictor on one more token of each row. states [Q, W]: its states of the token before. columns: those of a
        decode step; host_ids are the tokens to read. Returns its states [Q, W] of these tokens."""
        return self._model().predict(states, self._batch(columns, None))

    def draw(self, states: Tensor, columns: Mapping[str, Tensor]) -> Tensor:
        """Samples a token for each row from the predictor's logits of its states [Q, W], by the settings in columns. Returns the
        tokens [Q] int32."""
        drawn = torch.empty(2, len(states), dtype=torch.int32, device=self._device)
        for first in range(0, len(states), LOGITS_ROWS):
            part = slice(first, first + LOGITS_ROWS)
            logits = self._model().predicted_logits(states[part])
            entry.sample(logits, [columns[name][part] for name in SETTINGS], drawn[0, part], drawn[1, part])
        return drawn[0]

    def _mark(self) -> Any:
        """Returns a point in the device's time, after everything launched so far: an event, or, where kernels are interpreted, the
        host's seconds."""
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True, blocking=True)
        event.record()
        return event


@dataclass(slots=True, frozen=True)
class PendingProposals:
    """Drafts that are under way on the device; `wait` returns them. slots, counts [N]: slots of the step's sampling rows, and how
    many tokens to draft. told [1 + K, Q]: on the host, for each sequence the row after which its drafts come, then the drafts.
    marks: events before the predictor sees the step, after that, and after its drafts."""

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
    """A launched step and the drafts after it, as one Launched: `wait` returns the step's result with the drafts in it."""

    def __init__(self, step: Launched, proposals: PendingProposals) -> None:
        self._step, self._proposals = step, proposals

    def wait(self) -> StepResult:
        result = self._step.wait()
        result.proposed = self._proposals.wait()
        return result
