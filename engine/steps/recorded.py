"""Steps that are recorded the first time one of their kind comes, and run again from then on.

Of two kinds: decode steps, in which every row has one new token and samples, are recorded to their logits; steps with chunks of
prompts to the hidden states of what is sampled from, and for any of them the logits of so many rows. How tokens are drawn from
logits is recorded as well.

Shapes: R rows, T tokens, N sampling rows, W width.
"""

from __future__ import annotations

import logging
from contextlib import nullcontext

import numpy as np
import torch
from torch import Tensor

from engine import ops
from engine.contracts import BatchPlan, BoolArray, IntArray, SequenceTable
from engine.models.registry import CausalLM
from engine.steps.inputs import StepInputs
from engine.steps.program import Recorder, Scratch, recording
from engine.steps.replay import ChunkProgram, DecodeProgram, Drawing, Head, Replay
from loader.work_space import MAX_RECORDED_TOKENS, recorded_tokens

log = logging.getLogger("engine")

_CHUNK_SIZES = sorted({recorded_tokens(num_tokens) for num_tokens in range(1, MAX_RECORDED_TOKENS + 1)})


class RecordedSteps:
    """Programs of one model. A step's results stay as they are until the next one of any model.

    decodes: by number of rows; chunks: by number of tokens; heads, of steps with chunks: by number of rows that sample; padding
    counts.
    """

    def __init__(
        self, model: CausalLM, inputs: StepInputs, scratch: Scratch, max_decodes: int, max_rows: int, max_tokens: int
    ) -> None:
        """max_decodes: rows that sample at a time; max_rows, max_tokens: of steps with chunks. 0: such steps are not recorded."""
        self._model, self._inputs, self._scratch = model, inputs, scratch
        self._max_decodes, self._max_rows, self._max_tokens = max_decodes, max_rows, max_tokens
        self._draws = True  # while no drawing has been found to be more than kernels' calls
        self._picked: Tensor | None = None  # [rows, W]: hidden states that a step with chunks samples from
        self.decodes: dict[int, DecodeProgram] = {}
        self.chunks: dict[int, ChunkProgram] = {}
        self.heads: dict[int, Head] = {}

    def decode(self, plan: BatchPlan, table: SequenceTable) -> DecodeProgram | None:
        """One decode step's hidden states and logits. None: it is not one, or not of a kind that can be run here."""
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
        """Any step's normed hidden states [T and padding, W]. None: it is not of a kind that can be run here."""
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
        """One step's ids and bad rows, [N] each, with nothing of torch between kernels where there is nothing else. None: this step
        has not run, as it is not of a kind recorded already, or a row wants more than a token drawn by its settings."""
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
        """Sizes of steps with chunks that are not recorded yet. Until a step has shown that they can be: none."""
        if not (self.decodes or self.chunks) or not self._max_rows:
            return []
        return [size for size in _CHUNK_SIZES if size <= self._max_tokens and size not in self.chunks]

    def record_next(self) -> None:
        """The smallest of them, without running it: its first step then costs no more than later ones."""
        self._inputs.clear()
        size = self.missing[0]
        self._record_chunk(size, dry=True)
        self.chunks[size].lay_out()

    def forget_table(self) -> None:
        """The model's sequences are gone."""
        self._inputs.forget()

    def _decodes(self, plan: BatchPlan) -> bool:
        if len(plan.slots) > self._max_decodes:
            return False
        return plan.all_decode or bool(int(plan.num_new.max()) == 1 and plan.samples.all())

    def _chunks(self, plan: BatchPlan) -> bool:
        return len(plan.slots) <= self._max_rows and int(plan.num_new.sum()) <= self._max_tokens

    def _record_decode(self, num_rows: int) -> DecodeProgram:
        recorder = Recorder(self._scratch, watches=not self.decodes)  # a model's code is the same for all sizes
        with recording(recorder):
            hidden = self._model.forward(self._inputs.batch(num_rows, with_long_rows=False), None)
            program = DecodeProgram(recorder.calls, hidden, self._model.logits(hidden))
        if self._may_repeat(recorder):
            self.decodes[num_rows] = program
        return program

    def _record_chunk(self, num_tokens: int, dry: bool = False) -> ChunkProgram:
        recorder = Recorder(self._scratch, watches=not self.chunks and not dry, dry=dry)
        last_tokens = self._inputs.last_tokens
        with recording(recorder):
            hidden = self._model.forward(self._inputs.batch(num_tokens, with_long_rows=True), None)
            if self._picked is None:
                self._picked = torch.empty(len(last_tokens), hidden.shape[1], dtype=hidden.dtype)
            num_picked = min(num_tokens, len(last_tokens))
            ops.pick(hidden, torch.from_numpy(last_tokens[:num_picked]), self._picked[:num_picked])
            program = ChunkProgram(recorder.calls, hidden)
        if self._may_repeat(recorder):
            self.chunks[num_tokens] = program
        return program

    def _record_head(self, num_rows: int) -> Head:
        assert self._picked is not None
        recorder = Recorder(self._scratch, watches=not self.heads)
        with recording(recorder):
            head = Head(recorder.calls, self._model.logits(self._picked[:num_rows]))
        if self._may_repeat(recorder):
            self.heads[num_rows] = head
        return head

    def _may_repeat(self, recorder: Recorder) -> bool:
        if recorder.missed:
            log.info("steps are not recorded: %s is no operation of engine/ops.py", recorder.missed)
            self._max_decodes = self._max_rows = 0
        return not recorder.missed

    @torch.inference_mode()
    def _draw_first(self, program: DecodeProgram | ChunkProgram, head: Head | None, num_rows: int, greedy: bool) -> Drawing:
        """Runs a step, and records how tokens are drawn from logits of so many rows. head: None if it is not recorded, either."""
        program.run()
        if head is None:
            head = self._record_head(self._inputs.recorded_rows(num_rows))
        elif head is not program:
            head.run()
        recorder = Recorder(self._scratch)
        with recording(recorder):
            logits = head.logits[:num_rows]
            ids, bad = ops.greedy(logits) if greedy else ops.sample(logits, *self._inputs.settings.of(num_rows))
        self._draws = not recorder.missed  # else what was drawn now is right, and what repeats it is not
        step = program if isinstance(program, DecodeProgram) else None
        drawing = head.drawings[num_rows, greedy] = Drawing(recorder.calls, ids, bad, step)
        return drawing


def _run(*replays: Replay) -> None:
    """What torch computes of them, it computes without a look at gradients."""
    with nullcontext() if all(replay.is_native for replay in replays) else torch.inference_mode():
        for replay in replays:
            replay.run()
