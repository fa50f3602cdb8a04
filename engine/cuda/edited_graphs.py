"""Captures the CUDA graphs that sample rows whose logits are edited before sampling, or whose log-probabilities are wanted. Such a
graph is replayed right after the step's own graph. It computes the logits of its rows once more, edits them, samples, and leaves
all results in memory that one copy brings to the host.

A graph reads all its inputs from memory of the device. What each row asks for lies there in columns (arrays with one value for each
row), in which special values stand for "no mask", "no edit" and "no log-probabilities". Columns, hidden states and results do not
lie in the pool that graphs share, because the replay of the step's own graph may overwrite the pool while they are needed.

A size of graphs is a number of rows, up to MOST_ROWS. Rows that ask for nothing were sampled by the step's own graph and are not
among them. A step that exceeds one of the limits below is sampled without a graph (edited.py).

Shapes: B rows of a graph, N sampling rows of a step, V vocabulary, W width, S slots, K alternatives.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.cuda.columns import SETTINGS, padding_columns
from engine.cuda.edit_columns import EditedPart
from engine.cuda.edited_logits import edited_logits
from engine.cuda.graph_room import GraphRoom
from engine.cuda.graphs import StepGraphs, StepOutputs
from engine.cuda.kernels import entry
from engine.cuda.ops import logprobs_in
from engine.cuda.sequences import Column, Staging, words_of
from loader.sizes.gpu_sizing import EDITED_ROWS, LOGITS_ROWS, edited_graph_words

log = logging.getLogger("engine")

MOST_ROWS = EDITED_ROWS  # of a graph
MOST_TOP = 20  # alternatives of a row, as many as OpenAI's API allows
# The results have one column for each sampling row of a step, and some more that take those of padding rows.
RESULT_COLUMNS = LOGITS_ROWS + 4
NOBODY = np.int32(-1)
EVERYTHING = EditedPart({}, [], True, True, True)


class EditedMemory(NamedTuple):
    """The memory that a model's graphs of all sizes share.

    inputs: int32, the input columns. hidden: the hidden states [B, W] of the rows of the largest graph.
    told: int32, the results that are copied to the host: first sampled ids and flags, then log-probabilities of MOST_ROWS rows.
    told_drawn: the part of `told` with ids and flags. drawn: the same part as [2, RESULT_COLUMNS]."""

    inputs: Tensor
    hidden: Tensor
    told: Tensor
    told_drawn: Tensor
    drawn: Tensor

    @property
    def num_bytes(self) -> int:
        return self.inputs.nbytes + self.hidden.nbytes + self.told.nbytes


class EditedGraphs(StepGraphs[int]):
    """CUDA graphs, by row count, that sample the edited rows of one model's steps: those whose logits are changed before sampling
    (masked or biased, for example) or whose log-probabilities are wanted.

    logits_of: computes the logits [B, V] of hidden states [B, W]. last_ids [S + 1]: the newest token of each slot, which the graphs
    write. max_rows: the most rows of a graph; 0: there are no graphs."""

    def __init__(
        self,
        logits_of: Callable[[Tensor], Tensor],
        vocab_size: int,
        width: int,
        dtype: torch.dtype,
        last_ids: Tensor,
        staging: Staging,
        max_rows: int,
        room: GraphRoom | None = None,
    ) -> None:
        super().__init__(self.sample, staging, last_ids.device, room=room)
        self._logits_of, self._last_ids, self._width, self._dtype = logits_of, last_ids, width, dtype
        self._most_rows = min(max_rows, MOST_ROWS, edited_rows(len(last_ids) - 1))
        self._num_words = edited_graph_words(vocab_size)
        self._memory: EditedMemory | None = None
        self._paddings: dict[int, dict[str, npt.NDArray[Any]]] = {}
        self._numbers = np.arange(MOST_ROWS, dtype=np.int32)
        self._lacking = 0  # the size that a step has lacked last; 0: none since the last capture
        self._was_needed = False

    @property
    def are_captured(self) -> bool:
        """Returns whether this model may have such graphs at all (max_rows is above 0). A graph is captured only when it is
        needed."""
        return self._most_rows > 0

    @property
    def kept_bytes(self) -> int:
        memory = self._memory
        return 0 if memory is None else memory.num_bytes

    def size_for(self, num_rows: int, num_words: int) -> int:
        """Returns the size of the captured graph that takes num_rows rows; 0 if there is none. num_words: the number of words of
        these rows' masks, tokens, biases and banned ids, for which a graph has limited memory. If the step could have a graph that
        is not captured yet, remembers its size for capture_lacking."""
        size = edited_rows(num_rows)
        if not num_rows or size > self._most_rows or num_words > self._num_words or self.is_refused(size):
            return 0
        self._was_needed = True
        if size in self.captured:
            return size
        self._lacking = size
        return 0

    def capture_lacking(self) -> None:
        """Captures the graph whose size the last call of size_for has remembered, if any. Called by the thread that runs steps,
        before a step that has edited rows."""
        size, self._lacking = self._lacking, 0
        if size:
            self.capture_size(size)

    def capture_size(self, size: int) -> bool:
        """Captures the graph of a size, unless it exists or there was no memory for it a short while ago. Returns whether there is
        a graph of this size now."""
        if size in self.captured or self.is_refused(size):
            return size in self.captured
        return self.capture(size, self._padding(size) | {"words": np.zeros(1, np.int32)})

    def missing(self) -> list[int]:
        """Returns the sizes whose graphs are not captured and may be captured now, the smallest first. Returns none before a step
        has needed such a graph."""
        if not self._was_needed or not self._room.is_free():
            return []
        sizes = (1 << exponent for exponent in range(self._most_rows.bit_length()))
        return [size for size in sizes if size not in self.captured and not self.is_refused(size)]

    def replay(self, size: int, columns: Mapping[str, Column], hidden: Tensor, drawn: Tensor | None) -> EditedMemory:
        """Replays the graph of a captured size and returns the memory with its results. The next replay of any of these graphs
        overwrites that memory.

        columns: the inputs, made by the method `columns`. hidden [>= N, W]: the hidden states of the N sampling rows of the step.
        drawn [2, N]: the ids and flags that the step itself has sampled, which stay the results of all rows but the graph's; None:
        the graph samples all rows of the step."""
        memory = self._memory
        assert memory is not None
        inputs, graph = self._started(size, columns), self.captured[size]
        torch.index_select(hidden, 0, inputs[:size], out=graph.outputs.hidden)
        if drawn is not None:
            memory.drawn[:, : drawn.shape[1]].copy_(drawn)
        self._replay(size, graph)
        return memory

    def columns(
        self,
        rows: npt.NDArray[Any],
        slots: npt.NDArray[Any],
        nums: npt.NDArray[Any] | None,
        settings: Mapping[str, npt.NDArray[Any]],
        part: EditedPart,
    ) -> dict[str, Column]:
        """Returns the input columns of a replay.

        rows: the rows' indices among the sampling rows of the step. slots: their slots.
        nums: how many alternatives each row wants, -1 for no log-probabilities; None: no row wants any.
        settings: the rows' sampling settings. part: the edits of their logits."""
        own: dict[str, Column] = {"rows": rows, "places": rows, "slots": slots, **settings, **part.columns}
        if nums is not None:
            wanted = self._numbers[: len(nums)].copy()
            wanted[nums < 0] = NOBODY
            own |= {"wanted": wanted, "nums": nums}
        return own | {"words": part.words}

    def sample(self, columns: Mapping[str, Tensor]) -> StepOutputs:
        """Samples the rows that the columns describe, from the hidden states in the shared memory, and leaves the results there. It
        launches kernels only, so that the call can be captured in a graph."""
        memory = self._made_memory()
        num_rows = len(columns["slots"])
        hidden = memory.hidden[:num_rows]
        logits = self._logits_of(hidden)
        wide = edited_logits(logits, 0, num_rows, EVERYTHING, columns)
        ids, bad = torch.empty(2, num_rows, dtype=torch.int32, device=logits.device)
        entry.sample(wide, [columns[name] for name in SETTINGS], ids, bad)
        entry.set_entries(self._last_ids, columns["slots"], ids)
        for told, found in zip(memory.drawn, (ids, bad), strict=True):
            entry.set_entries(told, columns["places"], found)
        found = logprobs_in(memory.told[memory.drawn.numel() :], MOST_ROWS, MOST_TOP)
        entry.top_logprobs(logits, 0, columns["wanted"], columns["nums"], ids, *(one[:num_rows] for one in found))
        return StepOutputs(memory.told, hidden)

    def drop(self) -> None:
        super().drop()
        self._memory = None

    def _fixed_inputs(self, padding: Mapping[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
        memory = self._made_memory()
        return memory.inputs, self._staging.send(padding, memory.inputs)

    def _made_memory(self) -> EditedMemory:
        if self._memory is None:
            num_words = words_of(self._padding(self._most_rows)) + self._num_words
            inputs = torch.zeros(num_words, dtype=torch.int32, device=self._device)
            hidden = torch.zeros(self._most_rows, self._width, dtype=self._dtype, device=self._device)
            num_drawn = 2 * RESULT_COLUMNS
            told = torch.zeros(num_drawn + MOST_ROWS * (1 + 2 * MOST_TOP), dtype=torch.int32, device=self._device)
            drawn = told[:num_drawn]
            self._memory = EditedMemory(inputs, hidden, told, drawn, drawn.view(2, RESULT_COLUMNS))
        return self._memory

    def _padding(self, size: int) -> dict[str, npt.NDArray[Any]]:
        """Returns the input columns of `size` padding rows, which belong to no sequence. The column `words` is left out."""
        if (made := self._paddings.get(size)) is None:
            ints, sampling = np.zeros(size, np.int32), padding_columns(size, len(self._last_ids) - 1)
            made = {"rows": ints, "places": ints + np.int32(LOGITS_ROWS), "slots": sampling["slots"]}
            made |= {name: sampling[name] for name in SETTINGS}
            made |= {"masks": ints - np.int32(1), "counted": ints, "wanted": ints - np.int32(1), "nums": ints}
            made["edits"] = np.zeros(size * entry.EDIT_WORDS, np.int32)
            made["penalties"] = np.ones(size * entry.PENALTIES, np.float64)
            self._paddings[size] = made
        return made

    def _named(self, size: int) -> str:
        return f"{size} rows with edited logits or log-probabilities"


def edited_rows(num_rows: int) -> int:
    """Returns the number of rows of the graph that samples num_rows edited rows: num_rows rounded up to a power of two."""
    return 1 << max(0, num_rows - 1).bit_length()
