"""Drafts tokens on a GPU with a model's predictor (an additional layer for multi-token prediction, or a draft head), after each
step and from the states that the step left on the device.

Everything is launched right after the step, before the host knows which tokens the step sampled. So the host does not know either
how many drafted tokens of a sequence were accepted, or after which row the sequence's next drafts begin. It therefore sends, for
each row, the columns (input values) that drafts after this row would need. The device then picks the columns of the row that
sampled the sequence's newest token.

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
    """Runs a model's predictor after each of the model's steps: the predictor reads the tokens and states of the step, then drafts
    tokens.

    model: returns the loaded model. batch: makes the inputs of a forward pass from columns on the device. num_slots: S; slot S
    belongs to no sequence. tile_tokens: queries in a tile of attention (columns.extend_step)."""

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
        """Launches the predictor for a step that was just launched, and returns its drafts, which the device may still be
        computing. The predictor first reads the step's tokens. Then it drafts, for each sequence that samples, as many tokens as
        plan.to_propose says. Its keys and values are stored for all tokens of the step, and for all drafted tokens but the last.

        kept: tensors [>= T, W] with the states that the step kept for the predictor. ids [N] int32: the tokens that the step
        samples.

        A draft is sampled with the same random noise as the model's own token at the same position. Therefore both tokens are often
        the same where their distributions are close."""
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
        """Runs the predictor on a step's tokens. Returns its states [N, W] at the tokens after which the step samples. kept:
        tensors [T, W] with the model's states that the step kept. sent: the step's columns on the device; host_ids [T] holds for
        each token the token that follows it."""
        model = self._model()
        return model.predict(model.read(kept), self._batch(sent, step)).index_select(0, sent["wanted"])

    def _drafted(self, plan: BatchPlan, table: SequenceTable, states: Tensor, ids: Tensor, counts: IntArray) -> Tensor:
        """Drafts tokens. Returns [1 + K, Q] int32 on the device: for each sequence the index of the sampling row that sampled its
        newest token, then its drafted tokens.

        states [N, W]: the predictor's states at the sampling rows. ids [N]: the tokens that these rows sample. counts [N]: how many
        tokens to draft after each row if it has its sequence's newest token."""
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
        """Returns the columns named in DRAFT_COLUMNS (C of them) for K draft steps, as [K, C, N] flattened: the inputs that
        drafting after each sampling row needs if this row has its sequence's newest token. A row after which fewer than K tokens
        are drafted has slot S (no sequence) in the remaining draft steps."""
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
        """Runs the predictor on one more token of each sequence. states [Q, W]: the predictor's states at the token before.
        columns: the inputs of a decode step, whose host_ids are the tokens to read. Returns the predictor's states [Q, W] at these
        tokens."""
        return self._model().predict(states, self._batch(columns, None))

    def draw(self, states: Tensor, columns: Mapping[str, Tensor]) -> Tensor:
        """Samples a token for each sequence from the predictor's states [Q, W], by the settings in columns. Returns the tokens [Q]
        int32."""
        drawn = torch.empty(2, len(states), dtype=torch.int32, device=self._device)
        for first in range(0, len(states), LOGITS_ROWS):
            part = slice(first, first + LOGITS_ROWS)
            logits = self._model().predicted_logits(states[part])
            entry.sample(logits, [columns[name][part] for name in SETTINGS], drawn[0, part], drawn[1, part])
        return drawn[0]

    def _mark(self) -> Any:
        """Returns a mark of the device's time after everything launched so far: a CUDA event, or the host's seconds where kernels
        are interpreted."""
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True, blocking=True)
        event.record()
        return event


@dataclass(slots=True, frozen=True)
class PendingProposals:
    """The drafts after a step, which the device may still be computing; `wait` returns them.

    slots, counts [N]: the slots of the step's sampling rows, and how many tokens were asked for after each row.
    told [1 + K, Q], on the host: for each sequence the index of the sampling row after which its drafts come, then the drafts.
    marks: three times of the device: before the predictor reads the step, after that, and after the drafts."""

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
    """A launched step together with the drafts after it (a Launched): `wait` returns the step's result with the drafts in it."""

    def __init__(self, step: Launched, proposals: PendingProposals) -> None:
        self._step, self._proposals = step, proposals

    def wait(self) -> StepResult:
        result = self._step.wait()
        result.proposed = self._proposals.wait()
        return result
