"""Steps in which every row has one new token and samples: their input arrays, which stay where they are, and their programs.

Shapes: R rows, T tokens (R and padding), B blocks of the longest context a model may have.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
import torch

from engine.contracts import BatchPlan, SequenceTable
from engine.models.registry import CausalLM
from engine.steps.forward_batch import GroupBatch, GroupMemory, HostBatch, padded_rows
from engine.steps.program import Recorder, Scratch, recording
from engine.steps.replay import StepProgram

log = logging.getLogger("engine")


class DecodeInputs:
    """The arrays a decode step is computed from, for max_rows rows; the first of each are a smaller step's, and padding."""

    def __init__(
        self, memory: Sequence[GroupMemory], layer_places: Sequence[tuple[int, int]], max_rows: int, max_blocks: int, padded: bool
    ) -> None:
        self._layer_places, self._padded = layer_places, padded
        self._block_tokens = memory[0].kv.shape[4]
        max_rows = self.recorded_rows(max_rows)
        self._rows = np.arange(max_rows, dtype=np.int32)
        self._ones = np.ones(max_rows, np.int32)
        self._contexts = np.zeros(max_rows, np.int32)
        self._positions = torch.zeros(max_rows, 1)  # float32: padding has some row's of an earlier step
        self._input_ids = np.zeros(max_rows, np.int64)
        self._turns = {own.rotary: torch.zeros(max_rows, 2 * len(own.rotary.inv_freq)) for own in memory}
        self._groups = [
            GroupBatch(
                own.kv,
                own.kv_flat,
                own.window_tokens,
                np.zeros((max_rows, max_blocks), np.int32),  # pages that no step touches take no memory
                np.full(max_rows, -1, np.int64),
                self._turns[own.rotary],
                own.scales,
            )
            for own in memory
        ]

    def recorded_rows(self, num_rows: int) -> int:
        """Rows of the program that computes a step of num_rows: the last ones are padding, which stores nothing and attends to
        nothing. oneDNN wants few row counts anyway."""
        return padded_rows(num_rows) if self._padded else num_rows

    def batch(self, num_rows: int) -> HostBatch:
        """A program of num_rows, padding included, as views."""
        groups = [
            GroupBatch(
                own.kv,
                own.kv_flat,
                own.window_tokens,
                own.block_table[:num_rows],
                own.slots[:num_rows],
                own.cos_sin[:num_rows],
                own.scales,
            )
            for own in self._groups
        ]
        rows, contexts = self._rows[:num_rows], self._contexts[:num_rows]
        return HostBatch(
            input_ids=torch.from_numpy(self._input_ids[:num_rows]),
            num_tokens=num_rows,
            groups=groups,
            layer_places=self._layer_places,
            starts=rows,
            num_new=self._ones[:num_rows],
            contexts=contexts,
            paged_tokens=rows,
            paged_rows=rows,
            paged_contexts=contexts,
            long_rows=[],
        )

    def fill(self, plan: BatchPlan, table: SequenceTable) -> None:
        """Takes in a step, and makes padding of all rows behind it."""
        num_rows, positions = len(plan.slots), plan.num_computed
        rows, contexts = self._rows[:num_rows], self._contexts[:num_rows]
        np.add(positions, 1, out=contexts)
        self._contexts[num_rows:] = 0
        self._input_ids[:num_rows] = table.tokens[plan.slots, positions]
        num_blocks = -(-int(contexts.max()) // self._block_tokens)
        blocks, places = np.divmod(positions, self._block_tokens)
        for own, block_tables in zip(self._groups, table.block_tables, strict=True):
            own.block_table[:num_rows, :num_blocks] = block_tables[plan.slots, :num_blocks]
            slots = own.slots[:num_rows]
            slots[:] = own.block_table[rows, blocks]
            slots *= self._block_tokens
            slots += places
            own.slots[num_rows:] = -1
        self._positions.numpy()[:num_rows, 0] = positions
        for rotary, turns in self._turns.items():
            rotary.turn(self._positions[:num_rows], turns[:num_rows])


class DecodeSteps:
    """Programs of one model by number of rows, padding included, each recorded the first time such a step comes."""

    def __init__(self, model: CausalLM, inputs: DecodeInputs, scratch: Scratch, max_rows: int) -> None:
        self._model, self._inputs, self._scratch, self._max_rows = model, inputs, scratch, max_rows
        self.programs: dict[int, StepProgram] = {}

    def run(self, plan: BatchPlan, table: SequenceTable) -> StepProgram | None:
        """One step; its results stay until the next one of any model. None: it is not of a kind that can be run here."""
        num_rows = len(plan.slots)
        if num_rows > self._max_rows or int(plan.num_new.max()) > 1 or not plan.samples.all():
            return None
        self._inputs.fill(plan, table)
        num_rows = self._inputs.recorded_rows(num_rows)
        program = self.programs.get(num_rows)
        if program is None:
            return self._record(num_rows)
        program.run()
        return program

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
