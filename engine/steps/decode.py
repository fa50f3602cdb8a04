"""Steps in which every row has one new token and samples: their programs, which are recorded the first time such a step comes.

Shapes: R rows, N sampling rows.
"""

from __future__ import annotations

import logging

import torch

from engine import ops
from engine.contracts import BatchPlan, BoolArray, IntArray, SequenceTable
from engine.models.registry import CausalLM
from engine.steps.inputs import DecodeInputs
from engine.steps.program import Recorder, Scratch, recording
from engine.steps.replay import Drawing, StepProgram

log = logging.getLogger("engine")


class DecodeSteps:
    """Programs of one model by number of rows, padding included. Its steps stay as they are until the next one of any model."""

    def __init__(self, model: CausalLM, inputs: DecodeInputs, scratch: Scratch, max_rows: int) -> None:
        self._model, self._inputs, self._scratch, self._max_rows = model, inputs, scratch, max_rows
        self._draws = True  # while no drawing has been found to be more than kernels' calls
        self.programs: dict[int, StepProgram] = {}

    def run(self, plan: BatchPlan, table: SequenceTable) -> StepProgram | None:
        """One step's hidden states and logits. None: it is not of a kind that can be run here."""
        if not self._takes(plan):
            return None
        self._inputs.fill(plan, table)
        num_rows = self._inputs.recorded_rows(len(plan.slots))
        program = self.programs.get(num_rows)
        if program is None:
            return self._record(num_rows)
        program.run()
        return program

    def draw(self, plan: BatchPlan, table: SequenceTable) -> tuple[IntArray, BoolArray] | None:
        """One step's ids and bad rows, [N] each, with nothing of torch between kernels where there is nothing else. None: this step
        has not run, as it is not of a kind recorded already, or a row wants more than a token drawn by its settings."""
        num_rows = len(plan.slots)
        if not self._draws or not self._takes(plan):
            return None
        program = self.programs.get(self._inputs.recorded_rows(num_rows))
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

    def forget_table(self) -> None:
        """The model's sequences are gone."""
        self._inputs.forget()

    def _takes(self, plan: BatchPlan) -> bool:
        if len(plan.slots) > self._max_rows:
            return False
        return plan.all_decode or bool(int(plan.num_new.max()) == 1 and plan.samples.all())

    def _record(self, num_rows: int) -> StepProgram:
        recorder = Recorder(self._scratch)
        with recording(recorder):
            hidden = self._model.forward(self._inputs.batch(num_rows), None)
            program = StepProgram(recorder.calls, hidden, self._model.logits(hidden))
        if recorder.missed:
            log.info("steps are not recorded: %s is no operation of engine/ops.py", recorder.missed)
            self._max_rows = 0
        else:
            self.programs[num_rows] = program
        return program

    def _record_drawing(self, program: StepProgram, num_rows: int, greedy: bool) -> Drawing:
        """Draws the tokens of the step that has just run."""
        recorder = Recorder(self._scratch)
        with recording(recorder):
            logits = program.logits[:num_rows]
            ids, bad = ops.greedy(logits) if greedy else ops.sample(logits, *self._inputs.settings.of(num_rows))
        self._draws = not recorder.missed  # else what was drawn now is right, and what repeats it is not
        return Drawing(recorder.calls, ids, bad)
