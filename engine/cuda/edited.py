"""Samples rows whose logits are edited (penalties, bias, banned ids, masks) or whose log-probabilities are wanted, on the device
and without waiting for it. A part of the rows takes one copy to the device and a few launches, however many of them are edited; a
step's results come back in one copy.

Logits are edited in this order: a mask, in the logits' own type; then, in float32, the bias, penalties and banned ids. Rows without
edits are sampled along with the others from their logits as float32, which gives the same tokens.

Shapes: N sampling rows, V vocabulary, W width, M rows that want log-probabilities, K alternatives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.contracts.steps import StepResult
from engine.cuda.columns import SETTINGS, padding_columns, sampling_columns
from engine.cuda.edit_columns import EditedPart, KnownEdits
from engine.cuda.kernels import entry
from engine.cuda.ops import logprobs_in
from engine.cuda.sequences import Staging
from engine.sampling.logprobs import LogprobCollector
from engine.sampling.sampler import SamplingRows
from loader.gpu_sizing import LOGITS_ROWS
from scheduler.batch.plan import IntArray, LongArray

NUM_STAGING = 2  # copies under way at a time: they may be large, and few are needed


@dataclass(slots=True)
class EditedDraw:
    """The results of a step's rows, while they are computed. drawn [2, N] int32: sampled ids, and 1 for each row whose logits were
    not finite. told: the memory to be copied to the host: first `drawn`, then log-probabilities. request_ids [N]: the rows'
    requests. wanted [M]: the rows that want log-probabilities; num_top [N]: how many alternatives each row wants; None: no row
    wants any. num_best: K."""

    drawn: Tensor
    told: Tensor
    request_ids: LongArray
    num_top: IntArray | None
    wanted: IntArray
    num_best: int

    def result(self, told: Tensor, seconds: float) -> StepResult:
        """Returns the step's result. told: the copy of this object's `told` on the host. seconds: the step's device time."""
        num_rows = len(self.request_ids)
        drawn = told[: 2 * num_rows].numpy().reshape(2, num_rows)
        result = StepResult(drawn[0].copy(), drawn[1] != 0, seconds)
        if self.num_top is not None:
            picked, top_ids, top = logprobs_in(told[2 * num_rows :], len(self.wanted), self.num_best)
            good = ~result.bad[self.wanted]
            collector = LogprobCollector(self.num_top, self.request_ids)
            collector.add(self.wanted[good], picked.numpy()[good], top_ids.numpy()[good], top.numpy()[good])
            result.logprobs = collector.result()
        return result


class EditedSampling:
    """Samples the rows of one model's steps that no graph samples: those with edits, or whose log-probabilities are wanted. Called
    by the thread that runs steps. last_ids [S + 1]: the token of each slot's last step, updated here."""

    def __init__(self, vocab_size: int, num_slots: int, last_ids: Tensor) -> None:
        self._vocab_size, self._last_ids = vocab_size, last_ids
        self.staging = Staging(last_ids.device, NUM_STAGING)
        self._known = KnownEdits(num_slots)

    def draw(
        self,
        hidden: Tensor,
        rows: SamplingRows,
        slots: IntArray,
        request_ids: LongArray,
        drawn: Tensor | None,
        logits_of: Callable[[Tensor], Tensor],
    ) -> EditedDraw:
        """Launches the kernels that sample the rows of `slots` [N], whose hidden states are the first N of hidden [>= N, W], and
        returns their results to come. drawn [2, N]: the results that the step itself has sampled from unedited logits, used if no
        row is edited; None: it has sampled none. logits_of: computes [n, W] -> [n, V]."""
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
            ours.copy_(drawn)
        logits: Tensor | None = None
        for first, end in self._known.ranges(rows) if is_edited else _logits_ranges(num_rows):
            base = first // LOGITS_ROWS * LOGITS_ROWS
            if first == base:
                logits = None  # freed before the next are made, because the work space has room for the logits of some rows only
                logits = logits_of(hidden[first : first + LOGITS_ROWS])
            assert logits is not None
            part = self._known.part(rows, first, end) if is_edited else EditedPart({})
            asking = slice(*np.searchsorted(wanted, (first, end)))
            part.columns["wanted"] = wanted[asking] - np.int32(first)
            if drawn is None:
                part.columns |= {name: column[first:end] for name, column in settings.items()}
            sent = self.staging.send(part.columns)
            ids, bad = ours[0, first:end], ours[1, first:end]
            if drawn is None:
                own = _edited(logits, first - base, end - first, part, sent) if is_edited else logits[: end - first]
                entry.sample(own, [sent[name] for name in SETTINGS], ids, bad, is_cut=is_cut)
                del own
                entry.set_entries(self._last_ids, sent["slots"], ids)
            if asking.stop > asking.start:
                entry.top_logprobs(logits, first - base, sent["wanted"], ids, *(one[asking] for one in found))
        return EditedDraw(ours, told, request_ids, rows.num_top, wanted, num_best)

    def launch_all(self, logits: Tensor) -> None:
        """Launches every kernel that `draw` may launch, for the first row of logits [>= 1, V], which belongs to no sequence."""
        nothing = np.zeros(1, np.int32)
        part = EditedPart({"masks": nothing - np.int32(1), "bits": nothing, "counted": nothing + np.int32(1)}, 1, True, True)
        part.columns |= {"edits": np.zeros(entry.EDIT_WORDS, np.int32), "penalties": np.ones(entry.PENALTIES, np.float64)}
        part.columns |= dict.fromkeys(("tokens", "bias_ids", "banned"), nothing) | {"biases": np.zeros(1, np.float32)}
        sent = self.staging.send(part.columns | padding_columns(1, len(self._last_ids) - 1))
        ids, bad = torch.empty(2, 1, dtype=torch.int32, device=self._last_ids.device)
        entry.sample(_edited(logits, 0, 1, part, sent), [sent[name] for name in SETTINGS], ids, bad)
        found = logprobs_in(torch.empty(3, dtype=torch.int32, device=self._last_ids.device), 1, 1)
        entry.top_logprobs(logits, 0, sent["numbers"], ids, *found)


def _edited(logits: Tensor, first: int, num_rows: int, part: EditedPart, sent: Mapping[str, Tensor]) -> Tensor:
    """Returns num_rows rows of logits from `first` on as float32 [num_rows, V], with a part's masks and edits applied."""
    wide = torch.empty(num_rows, logits.shape[1], dtype=torch.float32, device=logits.device)
    # if no tokens are counted, the counts are not touched
    counts = torch.empty(wide.shape, dtype=torch.int32, device=logits.device) if part.longest else wide.view(torch.int32)
    entry.widen(logits, first, sent["masks"], sent["bits"], sent["counted"], wide, counts)
    if part.longest or part.has_bias:
        biases = sent["bias_ids"], sent["biases"]
        entry.add_biases_and_count(wide, counts, sent["edits"], part.longest, sent["tokens"], *biases, sent["banned"])
    if part.longest or part.has_ban:
        entry.penalise_and_ban(wide, counts, sent["edits"], sent["penalties"], part.longest, sent["tokens"], sent["banned"])
    return wide


def _logits_ranges(num_rows: int) -> Iterator[tuple[int, int]]:
    """Yields the rows of a step in parts (first, end) whose logits are computed at one time."""
    return ((first, min(first + LOGITS_ROWS, num_rows)) for first in range(0, num_rows, LOGITS_ROWS))
