"""The arrays a decode step is computed from. They stay where they are, so that recorded steps can count on them, and are filled
from the sequence table by kernels whose calls are laid out once for each table.

Shapes: R rows, T tokens (R and padding), B blocks of the longest context a model may have.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from engine import ops
from engine.contracts import BatchPlan, FloatArray, IntArray, SequenceTable
from engine.kernels.reference_inputs import APART, GREEDY, NUM_COUNTS, ROWS
from engine.steps.forward_batch import GroupBatch, GroupMemory, HostBatch, padded_rows
from engine.steps.program import Call
from engine.steps.replay import Replay


@dataclass(slots=True, frozen=True)
class Settings:
    """How each row's token is drawn, [max_rows] each: what ops.sample takes."""

    temperature: FloatArray
    top_p: FloatArray
    top_k: IntArray
    min_p: FloatArray
    key0: npt.NDArray[np.uint32]
    key1: npt.NDArray[np.uint32]

    def of(self, num_rows: int) -> tuple[npt.NDArray[Any], ...]:
        every = (self.temperature, self.top_p, self.top_k, self.min_p, self.key0, self.key1)
        return tuple(column[:num_rows] for column in every)


class DecodeInputs:
    """Of steps in which every row has one new token, for max_rows rows; the first of each array are a smaller step's, and padding.

    settings: of the rows of the latest step."""

    def __init__(
        self, memory: Sequence[GroupMemory], layer_places: Sequence[tuple[int, int]], max_rows: int, max_blocks: int, padded: bool
    ) -> None:
        self._layer_places, self._padded = layer_places, padded
        self._block_tokens = memory[0].kv.shape[4]
        max_rows = self.recorded_rows(max_rows)
        self._rows = np.arange(max_rows, dtype=np.int32)
        self._ones = np.ones(max_rows, np.int32)
        self._counts = np.zeros(NUM_COUNTS, np.int64)
        self._slots, self._computed = np.zeros(max_rows, np.int32), np.zeros(max_rows, np.int32)
        self._contexts = np.zeros(max_rows, np.int32)
        self._input_ids = np.zeros(max_rows, np.int64)  # padding has some row's of an earlier step, as it has a position
        floats, ints, keys = (np.zeros((2, max_rows), kind) for kind in (np.float32, np.int32, np.uint32))
        self.settings = Settings(floats[0], floats[1], ints[0], np.zeros(max_rows, np.float32), keys[0], keys[1])
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
        self._filling: tuple[SequenceTable, Replay] | None = None

    def recorded_rows(self, num_rows: int) -> int:
        """Rows of the program that computes a step of num_rows: the last ones are padding, which stores nothing and attends to
        nothing. oneDNN wants few row counts anyway."""
        return padded_rows(num_rows) if self._padded else num_rows

    def batch(self, num_rows: int) -> HostBatch:
        """A program of num_rows, padding included, as views; what it recorded first, turns positions."""
        for rotary, turns in self._turns.items():
            ops.rotary_turns(rotary, self._computed[:num_rows], turns[:num_rows])
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
        num_rows = len(plan.slots)
        self._counts[ROWS] = num_rows
        self._slots[:num_rows] = plan.slots
        self._computed[:num_rows] = plan.num_computed
        if self._filling is None or self._filling[0] is not table:
            self._filling = table, self._fill_from(table)
        self._filling[1].run()

    def forget(self) -> None:
        """The table is out of use."""
        self._filling = None

    @property
    def num_greedy(self) -> int:
        """Rows of the latest step that take their likeliest token."""
        return int(self._counts[GREEDY])

    @property
    def settings_suffice(self) -> bool:
        """Whether the latest step's tokens are drawn by `settings` alone: no row edits its logits or has log-probabilities told."""
        return not self._counts[APART]

    def _fill_from(self, table: SequenceTable) -> Replay:
        kernels, rows, own = ops.input_kernels(), (self._counts, self._slots, self._computed), self.settings
        calls = [Call(kernels.decode_rows, (*rows, table.tokens, self._input_ids, self._contexts))]
        for group, block_tables in zip(self._groups, table.block_tables, strict=True):
            to = (group.block_table, group.slots)
            calls.append(Call(kernels.decode_blocks, (*rows, block_tables, self._block_tokens, *to)))
        columns = (
            *(table.temperature, table.top_p, table.top_k, table.min_p, table.seed),
            *(table.num_logprobs, table.min_tokens_until, table.edits_logits, table.prompt_logprobs),
        )
        calls.append(Call(kernels.sampling_settings, (*rows, *columns, *own.of(len(self._slots)))))
        return Replay(calls)
