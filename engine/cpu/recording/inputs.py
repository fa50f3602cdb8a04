"""The input arrays of recorded steps. Their addresses never change, because programs (recorded steps) contain these addresses.
Kernels fill the arrays from the sequence table. The calls of these kernels are themselves recorded, once for each sequence table.

Shapes: R rows, T tokens (in decode steps R plus padding), B blocks of the longest context that the model may have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from engine.cpu.batch import LONG_ROW_TOKENS, GroupBatch, GroupMemory, HostBatch, adapter_numbers, padded_rows
from engine.cpu.ops import CpuOps
from engine.cpu.programs.program import Call
from engine.cpu.programs.replay import Replay
from engine.ops.ops import BatchAdapters
from engine.ops.step_counts import APART, ATTENDED, GREEDY, NUM_COUNTS, ROWS, SAMPLING, TOKENS
from scheduler.batch.plan import BatchPlan, FloatArray, IntArray, SequenceTable


@dataclass(slots=True, frozen=True)
class Settings:
    """The sampling settings of up to max_rows rows, as arrays [max_rows] that Ops.sample takes."""

    temperature: FloatArray
    top_p: FloatArray
    top_k: IntArray
    min_p: FloatArray
    key0: npt.NDArray[np.uint32]
    key1: npt.NDArray[np.uint32]

    def of(self, num_rows: int) -> tuple[npt.NDArray[Any], ...]:
        """Returns the settings of the first num_rows rows as arrays [num_rows], in the order in which Ops.sample takes them."""
        every = (self.temperature, self.top_p, self.top_k, self.min_p, self.key0, self.key1)
        return tuple(column[:num_rows] for column in every)


class StepInputs:
    """The input arrays of one model's recorded steps, for steps of up to max_rows rows and max_tokens tokens (at least as many as
    rows). A smaller step uses the first entries of each array; the other entries are padding.

    settings: the sampling settings of the rows that sample in the latest step. last_tokens: for each of these rows, the index of
    its last token in the step; zeros follow."""

    def __init__(
        self,
        ops: CpuOps,
        memory: Sequence[GroupMemory],
        layer_places: Mapping[int, tuple[int, int]],
        max_rows: int,
        max_tokens: int,
        max_blocks: int,
        padded: bool,
    ) -> None:
        self._ops, self._layer_places, self._padded = ops, layer_places, padded
        self._block_tokens = memory[0].kv.shape[4]
        max_rows = self.recorded_rows(max_rows)
        max_tokens = max(max_rows, max_tokens)
        self._counts = np.zeros(NUM_COUNTS, np.int64)
        self._told = memoryview(self._counts.data)  # its items are Python ints
        # arrays of rows
        self._slots, self._computed, self._num_new = (np.zeros(max_rows, np.int32) for _ in range(3))
        self._starts, self._contexts = np.zeros(max_rows, np.int32), np.zeros(max_rows, np.int32)
        self._samples, self.last_tokens = np.zeros(max_rows, np.bool_), np.zeros(max_rows, np.int64)
        floats, ints, keys = (np.zeros((2, max_rows), kind) for kind in (np.float32, np.int32, np.uint32))
        self.settings = Settings(floats[0], floats[1], ints[0], np.zeros(max_rows, np.float32), keys[0], keys[1])
        # arrays of tokens; padding keeps the ids and positions of an earlier step
        self._tokens = np.arange(max_tokens, dtype=np.int32)
        self._input_ids = np.zeros(max_tokens, np.int64)
        self._positions, self._paged_rows, self._paged_contexts = (np.zeros(max_tokens, np.int32) for _ in range(3))
        self._turns = {own.rotary: torch.zeros(max_tokens, 2 * len(own.rotary.inv_freq)) for own in memory}
        self._groups = [
            GroupBatch(
                own.kv,
                own.kv_flat,
                own.reach,
                np.zeros((max_rows, max_blocks), np.int32),  # pages that no step touches take no memory
                np.full(max_tokens, -1, np.int64),
                self._turns[own.rotary],
                own.scales,
            )
            for own in memory
        ]
        self._adapters: BatchAdapters | None = None
        self._filling: tuple[SequenceTable, Replay] | None = None
        self._decoding: IntArray | None = None  # slots of the latest step if it only decoded; often the next step has the same

    def recorded_rows(self, num_rows: int) -> int:
        """Returns the number of rows, padding included, of the recorded step that computes a decode step of num_rows rows:
        num_rows, or somewhat more if the model's steps are padded. Rows of padding store nothing and attend to nothing. Padding
        keeps the number of recorded steps low, and oneDNN is faster with few different numbers of rows."""
        return padded_rows(num_rows) if self._padded else num_rows

    def use_adapters(self, adapters: BatchAdapters) -> None:
        """Makes all steps that are recorded from now on compute the model's LoRA adapters. adapters: the model's tables, in which
        `numbers` is replaced by an array that `fill` writes."""
        self._adapters = replace(adapters, numbers=np.full(len(self._tokens), -1, np.int32))

    def batch(self, num_tokens: int, with_long_rows: bool) -> HostBatch:
        """Returns the inputs of a recorded step of num_tokens tokens, padding included, as views of the arrays. Before that it
        calls, once for each rotary embedding, the kernel that computes cosines and sines from positions; while a step is recorded,
        these are its first calls. with_long_rows: whether the step must be able to compute rows with more than LONG_ROW_TOKENS
        tokens."""
        for rotary, turns in self._turns.items():
            self._ops.rotary_turns(rotary, self._positions[:num_tokens], turns[:num_tokens])
        groups = [
            GroupBatch(
                own.kv,
                own.kv_flat,
                own.reach,
                own.block_table,
                own.slots[:num_tokens],
                own.cos_sin[:num_tokens],
                own.scales,
            )
            for own in self._groups
        ]
        adapters = self._adapters
        if adapters is not None:
            adapters = replace(adapters, numbers=adapters.numbers[:num_tokens])
        return HostBatch(
            input_ids=torch.from_numpy(self._input_ids[:num_tokens]),
            num_tokens=num_tokens,
            groups=groups,
            layer_places=self._layer_places,
            starts=self._starts,
            num_new=self._num_new,
            contexts=self._contexts,
            paged_tokens=self._tokens[:num_tokens],
            paged_rows=self._paged_rows[:num_tokens],
            paged_contexts=self._paged_contexts[:num_tokens],
            has_long_rows=with_long_rows,
            attended=self._counts[ATTENDED : ATTENDED + 1],
            adapters=adapters,
        )

    def fill(self, plan: BatchPlan, table: SequenceTable) -> None:
        """Fills the arrays with the inputs of a step, from its plan and the sequence table. All rows and tokens after the step's
        own become padding."""
        num_rows = len(plan.slots)
        self._computed[:num_rows] = plan.num_computed
        if not plan.all_decode or plan.slots is not self._decoding:
            self._told[ROWS], self._told[TOKENS] = num_rows, num_rows if plan.all_decode else int(plan.num_new.sum())
            self._slots[:num_rows] = plan.slots
            self._num_new[:num_rows], self._num_new[num_rows:] = plan.num_new, 0
            self._samples[:num_rows] = plan.samples
            self._decoding = plan.slots if plan.all_decode else None
        if self._adapters is not None:
            self._adapters.numbers[:] = adapter_numbers(plan, table, len(self._tokens))
        if self._filling is None or self._filling[0] is not table:
            self._filling = table, self._fill_from(table)
        self._filling[1].run()

    def clear(self) -> None:
        """Makes all rows and tokens in the arrays padding, which stores nothing and attends to nothing."""
        self._counts[:] = 0
        self._num_new[:] = 0
        self._decoding = None
        self._paged_contexts[:] = 0
        if self._adapters is not None:
            self._adapters.numbers[:] = -1
        for group in self._groups:
            group.slots[:] = -1

    def forget(self) -> None:
        """Drops the kernel calls that read the current sequence table, because the table is not used any more."""
        self._filling = None

    @property
    def num_sampling(self) -> int:
        """The number of rows of the latest step that sample."""
        return self._told[SAMPLING]

    @property
    def all_greedy(self) -> bool:
        """Returns whether all rows that sample in the latest step take their most likely token."""
        return self._told[GREEDY] == self._told[SAMPLING]

    @property
    def settings_suffice(self) -> bool:
        """Returns whether sampling in the latest step needs nothing but `settings`: no row changes its logits (bias, penalties) or
        wants log-probabilities."""
        return self._told[APART] == 0

    def _fill_from(self, table: SequenceTable) -> Replay:
        """Returns a Replay of kernel calls that fill the arrays from this sequence table at each run."""
        kernels, own = self._ops.input_kernels(), self.settings
        counts, slots, computed, contexts = self._counts, self._slots, self._computed, self._contexts
        rows, tokens = (counts, slots, computed), (self._positions, self._paged_rows)
        begun = (table.tokens, self._input_ids, self._positions, self._starts, contexts, self._paged_rows, self._paged_contexts)
        calls = [Call(kernels.step_tokens, (*rows, self._num_new, LONG_ROW_TOKENS, *begun))]
        for group, block_tables in zip(self._groups, table.block_tables, strict=True):
            to = (group.block_table, group.slots)
            calls.append(Call(kernels.step_blocks, (counts, slots, contexts, *tokens, block_tables, self._block_tokens, *to)))
        columns = (
            *(table.temperature, table.top_p, table.top_k, table.min_p, table.seed),
            *(table.num_logprobs, table.min_tokens_until, table.edits_logits, table.prompt_logprobs),
        )
        sampling = (*rows, self._num_new, self._starts, self._samples)
        calls.append(Call(kernels.sampling_settings, (*sampling, *columns, *own.of(len(self._slots)), self.last_tokens)))
        return Replay(calls)
