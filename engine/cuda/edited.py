"""Samples the rows of a step whose logits are edited before sampling (penalties, bias, banned ids, masks) or whose
log-probabilities are wanted, on the device and without waiting for it. The rows are computed in ranges: each range takes one copy
to the device and a few launches, however many of its rows are edited. All results of a step come back in one copy. Up to 64 such
rows are sampled by a CUDA graph of their own (edited_graphs.py); this file has the host's part of that, and the launches without a
graph.

Logits are edited in this order: a mask, in the logits' own type; then, in float32, the bias, penalties and banned ids. Rows without
edits that are sampled here, too, get the same tokens as in the step's own graph.

Shapes: N sampling rows (those that sample a token), V vocabulary, W width, M rows that want log-probabilities, K alternatives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.contracts.steps import StepResult
from engine.cuda.columns import SETTINGS, padding_columns, sampling_columns
from engine.cuda.edit_columns import EditedPart, KnownEdits, asking_rows, picked_rows
from engine.cuda.edited_graphs import MOST_ROWS, MOST_TOP, RESULT_COLUMNS, EditedGraphs
from engine.cuda.edited_logits import edited_logits
from engine.cuda.kernels import entry
from engine.cuda.ops import logprob_parts, logprobs_in
from engine.cuda.sequences import Group, Staging, num_words_in
from engine.sampling.logprobs import LogprobCollector
from engine.sampling.sampler import SamplingRows
from loader.sizes.gpu_sizing import LOGITS_ROWS
from scheduler.batch.plan import IntArray, LongArray

NUM_STAGING = 2  # copies under way at a time: they may be large, and few are needed


@dataclass(slots=True)
class EditedDraw:
    """The results of a step's sampling rows on the device, which may still be computing them.

    drawn [2, >= N] int32: the sampled ids, and 1 for each row whose logits were not finite.
    told: the memory that is copied to the host: first `drawn`, as two rows of num_columns numbers, then log-probabilities of
    num_found rows, with most_top alternatives each.
    request_ids [N]: the request of each sampling row.
    num_top [N]: how many alternatives each row wants; None: no row wants any.
    wanted [M]: the sampling rows that want log-probabilities. found [M]: the index among the num_found rows at which each of them
    has its log-probabilities."""

    drawn: Tensor
    told: Tensor
    num_columns: int
    request_ids: LongArray
    num_top: IntArray | None
    wanted: IntArray
    found: npt.NDArray[np.intp]
    num_found: int
    most_top: int

    def result(self, told: Tensor, seconds: float) -> StepResult:
        """Returns the step's result. told: the host's copy of this object's memory `told`. seconds: the step's device time."""
        words, num_drawn = told.numpy(), 2 * self.num_columns
        drawn = words[:num_drawn].reshape(2, self.num_columns)[:, : len(self.request_ids)]
        result = StepResult(drawn[0].copy(), drawn[1] != 0, seconds)
        if self.num_top is not None:
            rows, found = self.wanted, self.found
            if result.bad.any():
                good = ~result.bad[rows]
                rows, found = rows[good], found[good]
            # what logprobs_in returns, by numpy, which takes views of short arrays in a fraction of torch's time
            chosen, top_ids, top = logprob_parts(words[num_drawn:], self.num_found, self.most_top)
            shape, chosen, top = (self.num_found, self.most_top), chosen.view(np.float32), top.view(np.float32)
            collector = LogprobCollector(self.num_top, self.request_ids)
            of_rows = chosen, top_ids.reshape(shape), top.reshape(shape)
            # most often all of them: numpy takes a fraction of the time for a slice
            which = slice(len(found)) if len(found) and found[-1] == len(found) - 1 else found
            collector.add(rows, *(each[which] for each in of_rows))
            result.logprobs = collector.result()
        return result


class EditedSampling:
    """Samples the rows with edited logits or wanted log-probabilities of one model's steps, after the step's own graph. Called by
    the thread that runs steps. last_ids [S + 1]: the newest token of each of the model's S slots; this object updates it. graphs:
    the CUDA graphs that sample such rows; None: there are none."""

    def __init__(
        self, vocab_size: int, num_slots: int, last_ids: Tensor, staging: Staging | None = None, graphs: EditedGraphs | None = None
    ) -> None:
        self._vocab_size, self._last_ids, self._graphs = vocab_size, last_ids, graphs
        self.staging = staging or Staging(last_ids.device, NUM_STAGING)
        self._known = KnownEdits(num_slots, self.staging)

    def draw(
        self,
        hidden: Tensor,
        rows: SamplingRows,
        slots: IntArray,
        request_ids: LongArray,
        drawn: Tensor | None,
        logits_of: Callable[[Tensor], Tensor],
    ) -> EditedDraw:
        """Samples the rows of a step, by replaying a graph or by launching kernels, and returns the results, which the device may
        still be computing.

        hidden [>= N, W]: the hidden states of the rows come first. slots [N]: the rows' slots.
        drawn [2, >= N]: the tokens and flags that the step itself has sampled from unedited logits. With a graph, rows without
        edits keep them. Without a graph, they are kept only if no row has edits; otherwise all rows are sampled again. None: the
        step has sampled nothing.
        logits_of: computes the logits [n, V] of hidden states [n, W]."""
        if (
            self._graphs is not None
            and (replayed := self._replayed(self._graphs, hidden, rows, slots, request_ids, drawn)) is not None
        ):
            return replayed
        num_rows, is_edited = len(slots), rows.edits is not None or rows.allowed is not None
        is_cut = bool(((rows.top_p < 1.0) | (rows.top_k > 0) | (rows.min_p > 0.0)).any())
        settings = sampling_columns(rows) | {"slots": slots}
        wanted, num_best = np.empty(0, np.int32), 0
        if rows.num_top is not None:
            wanted, num_best = np.flatnonzero(rows.num_top >= 0).astype(np.int32), min(int(rows.num_top.max()), self._vocab_size)
        device = self._last_ids.device
        told = torch.empty(2 * num_rows + len(wanted) * (1 + 2 * num_best), dtype=torch.int32, device=device)
        ours, found = told[: 2 * num_rows].view(2, num_rows), logprobs_in(told[2 * num_rows :], len(wanted), num_best)
        if is_edited:
            drawn = None
        elif drawn is not None:
            ours.copy_(drawn[:, :num_rows])
        logits: Tensor | None = None
        for first, end in self._known.ranges(rows) if is_edited else _logits_ranges(num_rows):
            base = first // LOGITS_ROWS * LOGITS_ROWS
            if first == base:
                logits = None  # freed before the next are made, because the work space has room for the logits of some rows only
                logits = logits_of(hidden[first : first + LOGITS_ROWS])
            assert logits is not None
            part = self._known.part(rows, first, end) if is_edited else EditedPart({}, [])
            asking = slice(*np.searchsorted(wanted, (first, end)))
            part.columns["wanted"] = wanted[asking] - np.int32(first)
            if rows.num_top is not None:
                part.columns["nums"] = np.minimum(rows.num_top[wanted[asking]], np.int32(num_best))
            if drawn is None:
                part.columns |= {name: column[first:end] for name, column in settings.items()}
            sent = self.staging.send(part.columns | {"words": part.words})
            ids, bad = ours[0, first:end], ours[1, first:end]
            if drawn is None:
                own = edited_logits(logits, first - base, end - first, part, sent) if is_edited else logits[: end - first]
                entry.sample(own, [sent[name] for name in SETTINGS], ids, bad, is_cut=is_cut)
                del own
                entry.set_entries(self._last_ids, sent["slots"], ids)
            if asking.stop > asking.start:
                entry.top_logprobs(logits, first - base, sent["wanted"], sent["nums"], ids, *(one[asking] for one in found))
        places = np.arange(len(wanted))
        return EditedDraw(ours, told, num_rows, request_ids, rows.num_top, wanted, places, len(wanted), num_best)

    def _replayed(
        self,
        graphs: EditedGraphs,
        hidden: Tensor,
        rows: SamplingRows,
        slots: IntArray,
        request_ids: LongArray,
        drawn: Tensor | None,
    ) -> EditedDraw | None:
        """Samples the rows as `draw` does, but by replaying a graph. Returns None, and samples nothing, if no captured graph takes
        these rows."""
        num_rows, num_top = len(slots), rows.num_top
        if not graphs.are_captured or num_rows > LOGITS_ROWS or (num_top is not None and int(num_top.max()) > MOST_TOP):
            return None
        asking = np.arange(num_rows, dtype=np.int32) if drawn is None else asking_rows(rows)
        if len(asking) > MOST_ROWS:
            return None
        own = picked_rows(rows, asking)
        if own.edits is not None:
            self._known.look_up(own.edits)
        part = self._known.part(own, 0, len(asking))
        if not (size := graphs.size_for(len(asking), num_words_in(part.words))):
            return None
        nums = None if own.num_top is None else np.minimum(own.num_top, np.int32(self._vocab_size), dtype=np.int32)
        columns = graphs.columns(asking, slots[asking], nums, sampling_columns(own), part)
        memory = graphs.replay(size, columns, hidden, None if drawn is None or len(asking) == num_rows else drawn[:, :num_rows])
        wanted, found = np.empty(0, np.int32), np.empty(0, np.intp)
        told = memory.told_drawn
        if own.num_top is not None:
            (found,) = (own.num_top >= 0).nonzero()
            wanted, told = asking.take(found), memory.told
        of_results = (num_top, wanted, found, MOST_ROWS, MOST_TOP)
        return EditedDraw(memory.drawn, told, RESULT_COLUMNS, request_ids, *of_results)

    def launch_all(self, logits: Tensor) -> None:
        """Launches every kernel that `draw` may launch, so that all are compiled. logits [>= 1, V]: the kernels read the first row,
        which belongs to no sequence."""
        nothing = np.zeros(1, np.int32)
        part = EditedPart({"masks": nothing - np.int32(1), "counted": nothing + np.int32(1)}, [], True, True, True)
        part.words.append(Group([nothing], 1))
        part.columns |= {"edits": np.zeros(entry.EDIT_WORDS, np.int32), "penalties": np.ones(entry.PENALTIES, np.float64)}
        sent = self.staging.send(part.columns | padding_columns(1, len(self._last_ids) - 1) | {"words": part.words})
        ids, bad = torch.empty(2, 1, dtype=torch.int32, device=self._last_ids.device)
        entry.sample(edited_logits(logits, 0, 1, part, sent), [sent[name] for name in SETTINGS], ids, bad)
        found = logprobs_in(torch.empty(3, dtype=torch.int32, device=self._last_ids.device), 1, 1)
        entry.top_logprobs(logits, 0, sent["numbers"], sent["numbers"], ids, *found)


def _logits_ranges(num_rows: int) -> Iterator[tuple[int, int]]:
    """Yields the ranges of rows (first, end) of a step whose logits are computed at one time."""
    return ((first, min(first + LOGITS_ROWS, num_rows)) for first in range(0, num_rows, LOGITS_ROWS))
