"""Steps that are recorded the first time one of their kind comes, and run again from then on.

Of two kinds: decode steps, in which every row has one new token and samples, are recorded to their logits, and how tokens are drawn
from these as well; steps with chunks of prompts are recorded to their hidden states.

Shapes: R rows, T tokens, N sampling rows, W width.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from engine import ops
from engine.contracts import BatchPlan, BoolArray, IntArray, SequenceTable
from engine.models.registry import CausalLM
from engine.steps.inputs import StepInputs
from engine.steps.program import Recorder, Scratch, recording
from engine.steps.replay import DecodeProgram, Drawing, StepProgram
from loader.sizing import recorded_tokens

log = logging.getLogger("engine")


class RecordedSteps:
    """Programs of one model. A step's results stay as they are until the next one of any model.

    decodes: by number of rows; chunks: by number of tokens; padding counts.
    """

    def __init__(
        self, model: CausalLM, inputs: StepInputs, scratch: Scratch, max_decodes: int, max_rows: int, max_tokens: int
    ) -> None:
        """max_decodes: rows of decode steps; max_rows, max_tokens: of steps with chunks. 0: such steps are not recorded."""
        self._model, self._inputs, self._scratch = model, inputs, scratch
        self._max_decodes, self._max_rows, self._max_tokens = max_decodes, max_rows, max_tokens
        self._draws = True  # while no drawing has been found to be more than kernels' calls
        self.decodes: dict[int, DecodeProgram] = {}
        self.chunks: dict[int, StepProgram] = {}

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

    def draw(self, plan: BatchPlan, table: SequenceTable) -> tuple[IntArray, BoolArray] | None:
        """One decode step's ids and bad rows, [N] each, with nothing of torch between kernels where there is nothing else. None:
        this step has not run, as it is not of a kind recorded already, or a row wants more than a token drawn by its settings."""
        num_rows = len(plan.slots)
        if not self._draws or not self._decodes(plan):
            return None
        program = self.decodes.get(self._inputs.recorded_rows(num_rows))
        if program is None:
            return None
        self._inputs.fill(plan, table)
        if not self._inputs.settings_suffice:
            return None
        key = num_rows, self._inputs.num_greedy == num_rows
        drawing = program.drawings.get(key)
        if drawing is not None and program.is_native:
            program.run()
            drawing.run()
        else:
            with torch.inference_mode():
                program.run()
                if drawing is None:
                    drawing = program.drawings[key] = self._record_drawing(program, *key)
                else:
                    drawing.run()
        return drawing.ids.copy(), drawing.bad.copy()

    def hidden(self, plan: BatchPlan, table: SequenceTable) -> Tensor | None:
        """Any step's normed hidden states [T and padding, W]. None: it is not of a kind that can be run here."""
        num_tokens = int(plan.num_new.sum())
        if num_tokens > self._max_tokens or len(plan.slots) > self._max_rows:
            return None
        self._inputs.fill(plan, table)
        size = recorded_tokens(num_tokens)
        program = self.chunks.get(size)
        if program is None:
            return self._record_chunk(size).hidden
        program.run()
        return program.hidden

    def forget_table(self) -> None:
        """The model's sequences are gone."""
        self._inputs.forget()

    def _decodes(self, plan: BatchPlan) -> bool:
        if len(plan.slots) > self._max_decodes:
            return False
        return plan.all_decode or bool(int(plan.num_new.max()) == 1 and plan.samples.all())

    def _record_decode(self, num_rows: int) -> DecodeProgram:
        recorder = Recorder(self._scratch, watches=not self.decodes)  # a model's code is the same for all sizes
        with recording(recorder):
            hidden = self._model.forward(self._inputs.batch(num_rows, with_long_rows=False), None)
            program = DecodeProgram(recorder.calls, hidden, self._model.logits(hidden))
        if self._may_repeat(recorder):
            self.decodes[num_rows] = program
        return program

    def _record_chunk(self, num_tokens: int) -> StepProgram:
        recorder = Recorder(self._scratch, watches=not self.chunks)
        with recording(recorder):
            hidden = self._model.forward(self._inputs.batch(num_tokens, with_long_rows=True), None)
            program = StepProgram(recorder.calls, hidden)
        if self._may_repeat(recorder):
            self.chunks[num_tokens] = program
        return program

    def _may_repeat(self, recorder: Recorder) -> bool:
        if recorder.missed:
            log.info("steps are not recorded: %s is no operation of engine/ops.py", recorder.missed)
            self._max_decodes = self._max_rows = 0
        return not recorder.missed

    def _record_drawing(self, program: DecodeProgram, num_rows: int, greedy: bool) -> Drawing:
        """Draws the tokens of the step that has just run."""
        recorder = Recorder(self._scratch)
        with recording(recorder):
            logits = program.logits[:num_rows]
            ids, bad = ops.greedy(logits) if greedy else ops.sample(logits, *self._inputs.settings.of(num_rows))
        self._draws = not recorder.missed  # else what was drawn now is right, and what repeats it is not
        return Drawing(recorder.calls, ids, bad)
