"""Records each kind of step when it first runs, and makes the recorded calls again from then on.

Decode steps, in which every row has one new token and samples, are recorded up to their logits. Steps with chunks of prompts are
recorded up to the hidden states from which tokens are sampled; the computation of logits from these is recorded separately, once
for each number of rows. Sampling from logits is recorded separately, too.

Shapes: R rows, T tokens, N sampling rows, W width."""

from __future__ import annotations

import logging
from contextlib import nullcontext

import numpy as np
import torch
from torch import Tensor

from engine.cpu.batch import HostBatch
from engine.cpu.ops import CpuOps
from engine.cpu.programs.program import Recorder, Scratch, recording
from engine.cpu.programs.replay import ChunkProgram, DecodeProgram, Drawing, LogitsProgram, Replay
from engine.cpu.recording.inputs import StepInputs
from engine.models.registry import CausalLM
from loader.sizes.work_space import MAX_RECORDED_TOKENS, recorded_tokens
from scheduler.batch.plan import BatchPlan, BoolArray, IntArray, SequenceTable

log = logging.getLogger("engine")

_CHUNK_SIZES = sorted({recorded_tokens(num_tokens) for num_tokens in range(1, MAX_RECORDED_TOKENS + 1)})


class RecordedSteps:
    """The store of one model's programs (recorded steps). It records steps and runs them again. A step's results stay valid until
    the next step of any model.

    decodes: number of rows -> decode step.
    chunks: number of tokens -> step with chunks of prompts.
    heads: number of sampling rows -> computation of logits for steps with chunks of prompts.
    All these numbers include padding."""

    def __init__(
        self,
        ops: CpuOps,
        model: CausalLM[HostBatch],
        inputs: StepInputs,
        scratch: Scratch,
        max_decodes: int,
        max_rows: int,
        max_tokens: int,
        title: str,
    ) -> None:
        """Makes the store, without programs; each program is recorded when it is first needed.
        max_decodes: the most rows of a decode step that is recorded; 0: none are recorded.
        max_rows, max_tokens: the most rows and tokens of a step with chunks that is recorded; 0: none are recorded.
        title: names the model and its dtype in the log."""
        self._title = title
        self._ops, self._model, self._inputs, self._scratch = ops, model, inputs, scratch
        self._max_decodes, self._max_rows, self._max_tokens = max_decodes, max_rows, max_tokens
        self._draws = True  # False once sampling was found to need more than kernel calls
        self.kept: list[Tensor] | None = None  # [tokens, W] each: StepBatch.kept of the latest step; None: no step was recorded
        self._picked: Tensor | None = None  # [rows, W]: hidden states that steps with chunks sample from
        self.decodes: dict[int, DecodeProgram] = {}
        self.chunks: dict[int, ChunkProgram] = {}
        self.heads: dict[int, LogitsProgram] = {}

    def decode(self, plan: BatchPlan, table: SequenceTable) -> DecodeProgram | None:
        """Runs a decode step, and records it if no step with its number of rows was recorded before. Returns the program, which
        holds the step's hidden states and logits. Returns None, with nothing run, if the plan is not a decode step or has more than
        max_decodes rows."""
        if not self._decodes(plan):
            return None
        self._inputs.fill(plan, table)
        num_rows = self._inputs.recorded_rows(len(plan.slots))
        program = self.decodes.get(num_rows)
        if program is None:
            return self._record_decode(num_rows)
        program.run()
        return program

    def hidden(self, plan: BatchPlan, table: SequenceTable) -> Tensor | None:
        """Runs a step of any kind, and returns its hidden states after the final norm, [T with padding, W]. Records the step if no
        step with its number of tokens was recorded before. Returns None, with nothing run, if the plan has more than max_rows rows
        or max_tokens tokens."""
        if not self._chunks(plan):
            return None
        self._inputs.fill(plan, table)
        size = recorded_tokens(int(plan.num_new.sum()))
        program = self.chunks.get(size)
        if program is None:
            return self._record_chunk(size).hidden
        program.run()
        return program.hidden

    def draw(self, plan: BatchPlan, table: SequenceTable) -> tuple[IntArray, BoolArray] | None:
        """Runs a recorded step with its sampling. Returns the sampled ids [N], and for each sampling row whether its logits hold
        NaN or an infinity [N]. Records the sampling if it was not recorded before. Returns None, with nothing run, if the step was
        not recorded before, if its sampling cannot be recorded, or if a row changes its logits or wants log-probabilities."""
        if not self._draws:
            return None
        program: DecodeProgram | ChunkProgram | None = None
        if self._decodes(plan):
            program = self.decodes.get(self._inputs.recorded_rows(len(plan.slots)))
        elif self._chunks(plan) and int(plan.samples.sum()) <= self._max_decodes:
            program = self.chunks.get(recorded_tokens(int(plan.num_new.sum())))
        if program is None:
            return None
        inputs = self._inputs
        inputs.fill(plan, table)
        if not inputs.settings_suffice:
            return None
        num_sampling, greedy = inputs.num_sampling, inputs.all_greedy
        if not num_sampling:
            _run(program)
            return np.empty(0, np.int32), np.empty(0, np.bool_)
        head = program if isinstance(program, DecodeProgram) else self.heads.get(inputs.recorded_rows(num_sampling))
        drawing = None if head is None else head.drawings.get((num_sampling, greedy))
        if head is None or drawing is None:
            drawing = self._draw_first(program, head, num_sampling, greedy)
        elif head is program and drawing.is_native:
            drawing.run()
        elif head is program:
            _run(drawing)
        else:
            _run(program, head, drawing)
        return drawing.ids, drawing.bad

    @property
    def missing(self) -> list[int]:
        """The numbers of tokens for which no step with chunks of prompts is recorded yet. It is empty until any step was recorded,
        because only then is it known that the model's steps can be recorded."""
        if not (self.decodes or self.chunks) or not self._max_rows:
            return []
        return [size for size in _CHUNK_SIZES if size <= self._max_tokens and size not in self.chunks]

    def record_next(self) -> None:
        """Records a step with chunks of prompts, of the smallest size in `missing`, without computing it. The first step of this
        size then takes no longer than later ones."""
        self._inputs.clear()
        size = self.missing[0]
        self._record_chunk(size, dry=True)
        self.chunks[size].lay_out()

    def forget_table(self) -> None:
        """Drops everything that refers to the sequence table, because the model has no sequences any more."""
        self._inputs.forget()

    def _decodes(self, plan: BatchPlan) -> bool:
        """Returns whether the plan is a decode step with few enough rows to be recorded."""
        if len(plan.slots) > self._max_decodes:
            return False
        return plan.all_decode or bool(int(plan.num_new.max()) == 1 and plan.samples.all())

    def _chunks(self, plan: BatchPlan) -> bool:
        """Returns whether the plan has few enough rows and tokens to be recorded as a step with chunks of prompts."""
        return len(plan.slots) <= self._max_rows and int(plan.num_new.sum()) <= self._max_tokens

    def _record_decode(self, num_rows: int) -> DecodeProgram:
        recorder = Recorder(self._scratch, watches=not self.decodes)  # one size is enough: they share the model's code
        with recording(recorder):
            hidden = self._model.forward(self._keeping(self._inputs.batch(num_rows, with_long_rows=False)), None)
            logits = self._model.logits(hidden) if self._model.makes_logits else hidden
            program = DecodeProgram(recorder.calls, hidden, logits)
        if self._may_repeat(recorder):
            self.decodes[num_rows] = program
        return program

    def _record_chunk(self, num_tokens: int, dry: bool = False) -> ChunkProgram:
        recorder = Recorder(self._scratch, watches=not self.chunks and not dry, dry=dry)
        last_tokens = self._inputs.last_tokens
        with recording(recorder):
            hidden = self._model.forward(self._keeping(self._inputs.batch(num_tokens, with_long_rows=True)), None)
            if self._picked is None:
                self._picked = torch.empty(len(last_tokens), hidden.shape[1], dtype=hidden.dtype)
            num_picked = min(num_tokens, len(last_tokens))
            self._ops.pick(hidden, torch.from_numpy(last_tokens[:num_picked]), self._picked[:num_picked])
            program = ChunkProgram(recorder.calls, hidden)
        if self._may_repeat(recorder):
            self.chunks[num_tokens] = program
        return program

    def _keeping(self, batch: HostBatch) -> HostBatch:
        """Returns the given batch. If the model has a predictor, sets batch.kept to the memory for the states that the predictor
        reads; nothing overwrites these states before the model's next step."""
        if not (num := self._model.num_kept):
            return batch
        if self.kept is None:
            size = max(self._inputs.recorded_rows(self._max_rows), self._max_tokens)
            self.kept = [self._model.state_memory(size) for _ in range(num)]
        batch.kept = [one[: len(batch.input_ids)] for one in self.kept]
        return batch

    def _record_head(self, num_rows: int) -> LogitsProgram:
        assert self._picked is not None
        recorder = Recorder(self._scratch, watches=not self.heads)
        with recording(recorder):
            head = LogitsProgram(recorder.calls, self._model.logits(self._picked[:num_rows]))
        if self._may_repeat(recorder):
            self.heads[num_rows] = head
        return head

    def _may_repeat(self, recorder: Recorder) -> bool:
        """Returns whether the recorder has found all calls of the step, so that they may be made again. If not, logs the reason,
        and stops recording any steps."""
        if recorder.missed:
            why = "the cpu device has no kernels for some of their operations"
            log.info("%s: steps take longer, because %s (the first is torch's %s)", self._title, why, recorder.missed)
            self._max_decodes = self._max_rows = 0
        return not recorder.missed

    @torch.inference_mode()
    def _draw_first(
        self, program: DecodeProgram | ChunkProgram, head: LogitsProgram | None, num_rows: int, greedy: bool
    ) -> Drawing:
        """Runs a step and samples num_rows rows from its logits; records the sampling and returns it. program: the recorded step.
        head: the program that computes the logits; None: it is recorded first. greedy: whether all rows take their most likely
        token."""
        program.run()
        if head is None:
            head = self._record_head(self._inputs.recorded_rows(num_rows))
        elif head is not program:
            head.run()
        recorder = Recorder(self._scratch)
        with recording(recorder):
            logits = head.logits[:num_rows]
            ids, bad = self._ops.greedy(logits) if greedy else self._ops.sample(logits, *self._inputs.settings.of(num_rows))
        self._draws = not recorder.missed  # if something was missed, these tokens are right, but a replay's would not be
        step = program if isinstance(program, DecodeProgram) else None
        drawing = head.drawings[num_rows, greedy] = Drawing(recorder.calls, ids, bad, step)
        return drawing


def _run(*replays: Replay) -> None:
    """Makes the recorded calls of all these Replays, in order; in torch's inference mode, if torch makes some of the calls."""
    with nullcontext() if all(replay.is_native for replay in replays) else torch.inference_mode():
        for replay in replays:
            replay.run()
