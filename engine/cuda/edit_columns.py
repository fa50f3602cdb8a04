"""Makes the columns that the host sends to a GPU for rows whose logits are edited, in one copy for all such rows of a step
(kernels/triton_logits.py reads them). No code here loops over tokens.

Shapes: N sampling rows, E edits, S slots, W words of a mask.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.cuda.kernels import entry
from engine.cuda.sequences import Column
from engine.protocol import SamplingParams
from engine.sampling.sampler import LogitEdits, SamplingRows, banned_ids
from loader.gpu_sizing import EDITED_ROWS, EDITED_TOKENS, LOGITS_ROWS
from scheduler.batch.plan import IntArray, LongArray

NO_IDS, NO_VALUES = np.empty(0, np.int32), np.empty(0, np.float32)


@dataclass(slots=True)
class EditedPart:
    """Some rows of a step whose logits are edited together. columns: the columns to send; those of edits are missing if no row has
    edits. longest: number of tokens of the longest penalised sequence, 0 if there is none. has_bias, has_ban: whether any row has a
    bias, or a banned id."""

    columns: dict[str, Column]
    longest: int = 0
    has_bias: bool = False
    has_ban: bool = False


class KnownEdits:
    """The edits of logits that the requests in a model's slots ask for, as arrays that are made once for each request."""

    def __init__(self, num_slots: int) -> None:
        self._params: list[object] = [self] * num_slots  # an object that no request has
        self._penalties = np.zeros((num_slots, entry.PENALTIES), np.float64)
        self._penalised = np.zeros(num_slots, np.bool_)
        self._bias_ids, self._biases, self._banned = ([none] * num_slots for none in (NO_IDS, NO_VALUES, NO_IDS))
        self._num_biases, self._num_banned = np.zeros(num_slots, np.int32), np.zeros(num_slots, np.int32)

    def ranges(self, rows: SamplingRows) -> Iterator[tuple[int, int]]:
        """Yields the rows of a step in parts (first, end). A part has at most EDITED_ROWS rows and, unless it is a single row, at
        most EDITED_TOKENS penalised tokens. All logits of a part are computed together."""
        edits, num_rows = rows.edits, len(rows.temperature)
        tokens_before = np.zeros(num_rows + 1, np.int64)
        if edits is not None:
            self._look_up(edits)
            tokens_before[edits.rows + 1] = self._num_tokens(edits, slice(None))
            np.cumsum(tokens_before, out=tokens_before)
        first = 0
        while first < num_rows:
            fitting = int(np.searchsorted(tokens_before, tokens_before[first] + EDITED_TOKENS, "right")) - 1
            end = min(first + EDITED_ROWS, max(first + 1, fitting), (first // LOGITS_ROWS + 1) * LOGITS_ROWS, num_rows)
            yield first, end
            first = end

    def part(self, rows: SamplingRows, first: int, end: int) -> EditedPart:
        """Returns the columns for rows `first` to `end` - 1 of a step, a range that `ranges` has yielded."""
        masks = np.full(end - first, -1, np.int32)
        bits: npt.NDArray[np.uint32] = np.empty(0, np.uint32)
        if (allowed := rows.allowed) is not None:
            which = slice(*np.searchsorted(allowed.rows, (first, end)))
            masks[allowed.rows[which] - first] = np.arange(which.stop - which.start, dtype=np.int32)
            bits = np.ascontiguousarray(allowed.bits[which]).reshape(-1)
        part = EditedPart({"masks": masks, "bits": bits.view(np.int32), "counted": np.zeros(end - first, np.int32)})
        if rows.edits is not None:
            self._add_edits(part, rows.edits, first, end)
        return part

    def _add_edits(self, part: EditedPart, edits: LogitEdits, first: int, end: int) -> None:
        """Adds to the part the columns of the edits of rows `first` to `end` - 1."""
        which = slice(*np.searchsorted(edits.rows, (first, end)))
        slots, own, table = edits.slots[which], edits.rows[which] - first, edits.table
        num_tokens, early = self._num_tokens(edits, which), edits.early[which]
        num_biases, num_banned = self._num_biases[slots], np.where(early, self._num_banned[slots], 0)
        each = np.empty((len(slots), entry.EDIT_WORDS), np.int32)
        each[:, 0] = own
        each[:, 1], each[:, 3] = _ranges(num_tokens)
        each[:, 2] = each[:, 1] + np.minimum(table.num_prompt[slots], num_tokens)
        each[:, 4], each[:, 5] = _ranges(num_biases)
        each[:, 6], each[:, 7] = _ranges(num_banned)
        counted, listed = np.zeros(end - first, np.int32), slots.tolist()
        counted[own] = num_tokens > 0
        part.longest = int(num_tokens.max(initial=0))
        part.has_bias, part.has_ban = bool(num_biases.any()), bool(num_banned.any())
        part.columns |= {
            "counted": counted,
            "edits": each.reshape(-1),
            "penalties": self._penalties[slots].reshape(-1),
            "tokens": [table.tokens[slot, :num] for slot, num in zip(listed, num_tokens.tolist(), strict=True) if num],
            "bias_ids": [self._bias_ids[slot] for slot in listed] if part.has_bias else NO_IDS,
            "biases": [self._biases[slot] for slot in listed] if part.has_bias else NO_VALUES,
            "banned": [self._banned[slot] for slot in slots[early].tolist()] if part.has_ban else NO_IDS,
        }

    def _num_tokens(self, edits: LogitEdits, which: slice) -> IntArray:
        """Returns, for each edit in the slice `which`, how many tokens of its sequence are penalised; 0 without penalties."""
        return np.where(self._penalised[edits.slots[which]], edits.positions[which], 0).astype(np.int32)

    def _look_up(self, edits: LogitEdits) -> None:
        """Makes the arrays of the edits' slots anew, where a slot has another request than before."""
        given = edits.table.params
        for slot in edits.slots.tolist():
            if self._params[slot] is not given[slot]:
                self._read(slot, given[slot], edits.end_ids, edits.vocab_size)

    def _read(self, slot: int, params: object | None, end_ids: list[int], vocab_size: int) -> None:
        assert params is None or isinstance(params, SamplingParams)
        self._params[slot] = params
        asked = SamplingParams(1) if params is None else params
        penalties = (asked.presence_penalty, asked.frequency_penalty, asked.repetition_penalty)
        self._penalties[slot, :3], self._penalised[slot] = penalties, penalties != (0.0, 0.0, 1.0)
        self._bias_ids[slot] = np.fromiter(asked.logit_bias, np.int32)
        self._biases[slot] = np.fromiter(asked.logit_bias.values(), np.float32)
        self._banned[slot] = banned_ids(end_ids, params, vocab_size).astype(np.int32)
        self._num_biases[slot], self._num_banned[slot] = len(self._bias_ids[slot]), len(self._banned[slot])


def _ranges(counts: IntArray) -> tuple[LongArray, LongArray]:
    """Returns the begin and the end of each of several adjacent ranges, the first of which begins at 0. counts: their lengths."""
    ends: LongArray = np.cumsum(counts, dtype=np.int64)
    return ends - counts, ends
