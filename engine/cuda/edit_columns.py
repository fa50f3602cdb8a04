"""Makes the columns that the host sends to a GPU for rows whose logits are edited, in one copy for all such rows of a step
(kernels/triton_logits.py reads them). No code here loops over tokens.

Shapes: N sampling rows, E edits, S slots, W words of a mask.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.cuda.kernels import entry
from engine.protocol import SamplingParams
from engine.sampling.sampler import LogitEdits, SamplingRows, banned_ids
from loader.sizes.gpu_sizing import EDITED_ROWS, EDITED_TOKENS, LOGITS_ROWS
from scheduler.batch.plan import IntArray, LongArray

NO_WORDS = np.empty(0, np.int32)


@dataclass(slots=True)
class EditedPart:
    """Some rows of a step whose logits are edited together. columns: the columns to send; those of edits are missing if no row has
    edits. words: the pieces of a last column, into which the others point: masks, tokens, biases and banned ids. has_tokens,
    has_bias, has_ban: whether any row has penalised tokens, a bias, or a banned id."""

    columns: dict[str, npt.NDArray[Any]]
    words: list[IntArray]
    has_tokens: bool = False
    has_bias: bool = False
    has_ban: bool = False


class KnownEdits:
    """The edits of logits that the requests in a model's slots ask for, as arrays that are made once for each request."""

    def __init__(self, num_slots: int) -> None:
        self._params: list[object] = [self] * num_slots  # an object that no request has
        self._penalties = np.zeros((num_slots, entry.PENALTIES), np.float64)
        self._penalised = np.zeros(num_slots, np.bool_)
        self._biases, self._banned = [NO_WORDS] * num_slots, [NO_WORDS] * num_slots  # biases: the ids, then the values
        self._num_biases, self._num_banned = np.zeros(num_slots, np.int32), np.zeros(num_slots, np.int32)

    def ranges(self, rows: SamplingRows) -> Iterator[tuple[int, int]]:
        """Yields the rows of a step in parts (first, end). A part has at most EDITED_ROWS rows and, unless it is a single row, at
        most EDITED_TOKENS penalised tokens. All logits of a part are computed together."""
        edits, num_rows = rows.edits, len(rows.temperature)
        tokens_before = np.zeros(num_rows + 1, np.int64)
        if edits is not None:
            self.look_up(edits)
            tokens_before[edits.rows + 1] = self._num_tokens(edits, slice(None))
            np.cumsum(tokens_before, out=tokens_before)
        first = 0
        while first < num_rows:
            fitting = int(np.searchsorted(tokens_before, tokens_before[first] + EDITED_TOKENS, "right")) - 1
            end = min(first + EDITED_ROWS, max(first + 1, fitting), (first // LOGITS_ROWS + 1) * LOGITS_ROWS, num_rows)
            yield first, end
            first = end

    def part(self, rows: SamplingRows, first: int, end: int) -> EditedPart:
        """Returns the columns for rows `first` to `end` - 1 of a step. The requests of their edits must have been looked up."""
        part = EditedPart({"masks": np.full(end - first, -1, np.int32), "counted": np.zeros(end - first, np.int32)}, [])
        num_words = 0
        if (allowed := rows.allowed) is not None:
            which = slice(*np.searchsorted(allowed.rows, (first, end)))
            bits = np.ascontiguousarray(allowed.bits[which]).view(np.int32)
            part.columns["masks"][allowed.rows[which] - first] = np.arange(len(bits), dtype=np.int32) * np.int32(bits.shape[1])
            num_words = bits.size
            part.words.append(bits.reshape(-1))
        if rows.edits is not None:
            self._add_edits(part, rows.edits, first, end, num_words)
        return part

    def _add_edits(self, part: EditedPart, edits: LogitEdits, first: int, end: int, num_words: int) -> None:
        """Adds to the part the columns of the edits of rows `first` to `end` - 1. num_words: how many words it has."""
        which = slice(*np.searchsorted(edits.rows, (first, end)))
        slots, own, table = edits.slots[which], edits.rows[which] - first, edits.table
        num_tokens, early = self._num_tokens(edits, which), edits.early[which]
        num_biases, num_banned = self._num_biases[slots], np.where(early, self._num_banned[slots], 0)
        each = np.empty((len(slots), entry.EDIT_WORDS), np.int32)
        each[:, 0] = own
        each[:, 1], each[:, 3] = _ranges(num_tokens, num_words)
        each[:, 2] = each[:, 1] + np.minimum(table.num_prompt[slots], num_tokens)
        num_words += int(num_tokens.sum())
        each[:, 4], _ = _ranges(2 * num_biases, num_words)
        each[:, 5] = each[:, 4] + num_biases
        num_words += 2 * int(num_biases.sum())
        each[:, 6], each[:, 7] = _ranges(num_banned, num_words)
        listed = slots.tolist()
        part.columns["counted"][own] = num_tokens > 0
        part.columns |= {"edits": each.reshape(-1), "penalties": self._penalties[slots].reshape(-1)}
        part.has_tokens, part.has_bias, part.has_ban = bool(num_tokens.any()), bool(num_biases.any()), bool(num_banned.any())
        if part.has_tokens:
            part.words += [table.tokens[slot, :num] for slot, num in zip(listed, num_tokens.tolist(), strict=True) if num]
        if part.has_bias:
            part.words += [self._biases[slot] for slot in listed]
        if part.has_ban:
            part.words += [self._banned[slot] for slot in slots[early].tolist()]

    def _num_tokens(self, edits: LogitEdits, which: slice) -> IntArray:
        """Returns, for each edit in the slice `which`, how many tokens of its sequence are penalised; 0 without penalties."""
        return np.where(self._penalised[edits.slots[which]], edits.positions[which], 0).astype(np.int32)

    def look_up(self, edits: LogitEdits) -> None:
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
        ids, biases = np.fromiter(asked.logit_bias, np.int32), np.fromiter(asked.logit_bias.values(), np.float32)
        self._biases[slot] = np.concatenate((ids, biases.view(np.int32)))
        self._banned[slot] = banned_ids(end_ids, params, vocab_size).astype(np.int32)
        self._num_biases[slot], self._num_banned[slot] = len(ids), len(self._banned[slot])


def asking_rows(rows: SamplingRows) -> IntArray:
    """Returns the rows of a step that have edits, a mask, or want log-probabilities, ascending."""
    asking = np.zeros(len(rows.temperature), np.bool_)
    if rows.edits is not None:
        asking[rows.edits.rows] = True
    if rows.allowed is not None:
        asking[rows.allowed.rows] = True
    if rows.num_top is not None:
        asking |= rows.num_top >= 0
    return np.flatnonzero(asking).astype(np.int32)


def picked_rows(rows: SamplingRows, which: IntArray) -> SamplingRows:
    """Returns some rows of a step, `which` ascending, among which are all that have edits or a mask."""
    if len(which) == len(rows.temperature):
        return rows
    edits, allowed = rows.edits, rows.allowed
    return SamplingRows(
        rows.all_greedy,
        rows.temperature[which],
        rows.top_p[which],
        rows.top_k[which],
        rows.min_p[which],
        rows.key0 if rows.all_greedy else rows.key0[which],
        rows.key1 if rows.all_greedy else rows.key1[which],
        None if edits is None else replace(edits, rows=np.searchsorted(which, edits.rows)),
        None if rows.num_top is None else rows.num_top[which],
        None if allowed is None else replace(allowed, rows=np.searchsorted(which, allowed.rows)),
    )


def _ranges(counts: IntArray, first: int) -> tuple[LongArray, LongArray]:
    """Returns the begin and the end of each of several adjacent ranges, the first of which begins at `first`. counts: their
    lengths."""
    ends: LongArray = np.cumsum(counts, dtype=np.int64) + first
    return ends - counts, ends
