"""Makes the columns (arrays of per-row or per-edit values) that the host sends to a GPU for the rows of a step whose logits are
edited: penalties, biases, banned ids and masks. kernels/triton_logits.py reads them. Nothing here loops over tokens in Python.

A large step is divided into ranges of rows. One copy to the device describes all edited rows of a range (EditedPart). Masks and
tokens that lie in page-locked memory take a copy each besides.

Shapes: N sampling rows, E edits (one for each row with penalties, a bias or banned ids), S slots, W words of a mask, M rows that
have masks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from engine.cuda.kernels import entry
from engine.cuda.sequences import Group, Staging, num_words_in
from engine.grammar.row_masks import RowMasks
from engine.protocol import SamplingParams
from engine.sampling.sampler import LogitEdits, SamplingRows, banned_ids
from loader.sizes.gpu_sizing import EDITED_GRAPH_WORDS, EDITED_ROWS, EDITED_TOKENS, LOGITS_ROWS
from scheduler.batch.plan import BoolArray, IntArray, LongArray, SequenceTable

NO_WORDS = np.empty(0, np.int32)
NO_OTHERS = np.empty(0, np.intp)
MOST_GAPS = 2  # a span of masks is at most so many times as long as those that are needed of it
KEPT_STEPS = 64  # steps whose tokens are added to those that are kept in page-locked memory, before all are written there anew


@dataclass(slots=True)
class EditedPart:
    """The edits of one range of a step's rows.

    columns: the columns to send; without those that describe edits if no row has any.
    words: the content of the last column, to which values in the other columns point: groups of arrays of biases, banned ids, masks
    and tokens.
    has_tokens, has_bias, has_ban: whether any row has penalised tokens, a bias, or a banned id."""

    columns: dict[str, npt.NDArray[Any]]
    words: list[Group]
    has_tokens: bool = False
    has_bias: bool = False
    has_ban: bool = False


@dataclass(slots=True)
class _Lasting:
    """The part of some rows' edits that does not depend on the rows' tokens, kept for the next step. It stays valid while the same
    requests have the same rows, and none of them reaches its min_tokens.

    edits [E, EDIT_WORDS]: the words that describe each edit; they point at tokens only while `tokens` is not None.
    penalties [E PENALTIES]: the penalties of each edit, one edit after the other.
    penalised [E]: whether the edit has penalties.
    words: the biases and banned ids to which the edits point.

    tokens: the page-locked memory with the tokens of these edits' sequences; None: they are not kept there. begins [E]: the index
    in it of each sequence's first token. steps_left: how many more steps' tokens it has room for. now, next: what identifies the
    tokens of the last step, and those of a step in which each sequence has one more token."""

    edits: IntArray
    penalties: npt.NDArray[np.float64]
    penalised: BoolArray
    words: IntArray
    has_tokens: bool
    has_bias: bool
    has_ban: bool
    tokens: Group | None = None
    begins: IntArray = field(default_factory=lambda: NO_WORDS)
    steps_left: int = 0
    now: tuple[int, bytes, bytes] = 0, b"", b""
    next: tuple[int, bytes, bytes] = 0, b"", b""


class _Span(NamedTuple):
    """Masks of a range's rows that lie close together in page-locked memory, so that the device copies them at once.

    words: the memory from the first of these masks to the last. rows [M]: the rows that have these masks. places [M]: the index in
    `words` at which each row's mask begins. others: the indices of those masks of the range that lie elsewhere."""

    words: IntArray
    rows: npt.NDArray[np.intp]
    places: IntArray
    others: npt.NDArray[np.intp]


class KnownEdits:
    """The edits of logits (penalties, biases, banned ids) for which the requests in a model's slots ask, as arrays. The arrays are
    made once for each request. staging: makes page-locked memory, and sends what this object returns."""

    def __init__(self, num_slots: int, staging: Staging) -> None:
        self._staging = staging
        self._tokens: Tensor | None = None  # page-locked, made when it is needed
        self._params: list[object] = [self] * num_slots  # an object that no request has
        self._penalties = np.zeros((num_slots, entry.PENALTIES), np.float64)
        self._penalised = np.zeros(num_slots, np.bool_)
        self._biases, self._banned = [NO_WORDS] * num_slots, [NO_WORDS] * num_slots  # biases: the ids, then the values
        self._num_biases, self._num_banned = np.zeros(num_slots, np.int32), np.zeros(num_slots, np.int32)
        self._numbers = np.arange(EDITED_ROWS, dtype=np.int32)
        # Those of the last part, and whose they are. Forgotten when any slot's arrays are made anew.
        self._lasting: tuple[tuple[bytes, ...], _Lasting] | None = None

    def ranges(self, rows: SamplingRows) -> Iterator[tuple[int, int]]:
        """Yields the ranges of rows (first, end) into which a step is divided. The logits of a range are computed together. A range
        has at most EDITED_ROWS rows and, unless it is a single row, at most EDITED_TOKENS penalised tokens."""
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
        """Returns the columns that describe the edits and masks of rows `first` to `end` - 1 of a step. `look_up` must have been
        called for the step's edits."""
        part = EditedPart({"masks": np.full(end - first, -1, np.int32), "counted": np.zeros(end - first, np.int32)}, [])
        lasting, edits, which = None, rows.edits, slice(None)
        if edits is not None:
            which = _within(edits.rows, first, end, len(rows.temperature))
            lasting = self._lasting_of(edits.slots[which], edits.early[which], edits.rows[which] - first)
            part.words.append(Group([lasting.words], len(lasting.words)))
        num_words = 0 if lasting is None else len(lasting.words)
        span: _Span | None = None
        if (allowed := rows.allowed) is not None:
            masked = _within(allowed.rows, first, end, len(rows.temperature))
            bits, own = allowed.bits[masked], allowed.rows[masked] - first
            if (span := _span_of(allowed, masked, own)) is not None:
                own, bits = own[span.others], [bits[at] for at in span.others.tolist()]
            if bits:
                width = len(bits[0])
                part.columns["masks"][own] = num_words + width * self._numbers[: len(bits)]
                part.words.append(Group(bits, width * len(bits)))
                num_words += width * len(bits)
        if edits is not None and lasting is not None:
            self._add_edits(part, lasting, edits, which, num_words)
        if span is not None:
            part.columns["masks"][span.rows] = num_words_in(part.words) + span.places
            part.words.append(Group([span.words], len(span.words), is_locked=True))
        return part

    def _add_edits(self, part: EditedPart, lasting: _Lasting, edits: LogitEdits, which: slice, num_words: int) -> None:
        """Adds to `part` the columns of those of a step's edits that are in the slice `which`. lasting: the part of these edits
        that does not depend on tokens. num_words: the number of words that `part` already has."""
        each = lasting.edits
        if lasting.has_tokens:
            slots, table = edits.slots[which], edits.table
            num_tokens: IntArray = edits.positions[which] * lasting.penalised
            if self._keeps_tokens(lasting, slots, num_tokens, table, num_words):
                assert lasting.tokens is not None
                part.words.append(lasting.tokens)
            else:
                each, ends = each.copy(), num_tokens.cumsum(dtype=np.int32)
                _point_at_tokens(each, table, slots, num_tokens, ends - num_tokens + np.int32(num_words))
                part.words.append(Group(_first_tokens(table, slots, num_tokens), int(ends[-1])))
            each[:, 3] = each[:, 1] + num_tokens
            part.columns["counted"][each[:, 0]] = num_tokens
        part.columns |= {"edits": each.reshape(-1), "penalties": lasting.penalties}
        part.has_tokens, part.has_bias, part.has_ban = lasting.has_tokens, lasting.has_bias, lasting.has_ban

    def _keeps_tokens(self, lasting: _Lasting, slots: IntArray, num_tokens: IntArray, table: SequenceTable, num_words: int) -> bool:
        """Returns whether the tokens of a step's edits are in the page-locked memory lasting.tokens, at which lasting.edits points.
        If so, brings them up to date: if the step before had the same sequences, each with one token less, one token of each is
        written. They are kept from the second such step on. num_words: the number of words that are sent before them.

        What is kept stays right, and no copy reads what is written: a request's tokens change only where they are drafted, and only
        a slot that is in a step twice has drafted tokens before its last; and the host knows each sequence's newest token only
        after it has read the step before."""
        now, goes_on = (num_words, table.request_id.take(slots).tobytes(), num_tokens.tobytes()), False
        if now != lasting.now:  # else the same step again, without a graph
            goes_on = now == lasting.next
            lasting.now, lasting.next = now, (*now[:2], (num_tokens + lasting.penalised).tobytes())
            if goes_on and lasting.tokens is not None and lasting.steps_left:
                lasting.steps_left -= 1
                newest = np.maximum(num_tokens - 1, 0)
                self._locked_tokens().numpy()[lasting.begins + newest] = table.tokens[slots, newest]
            else:
                lasting.tokens = None
                if goes_on:
                    lasting.tokens = self._laid_out_tokens(lasting, slots, num_tokens, table, num_words)
        return lasting.tokens is not None

    def _laid_out_tokens(
        self, lasting: _Lasting, slots: IntArray, num_tokens: IntArray, table: SequenceTable, num_words: int
    ) -> Group | None:
        """Writes all tokens of a step's edits to page-locked memory, with room for those of KEPT_STEPS steps more, and lets
        lasting.edits point at them. Returns None, and writes nothing, if a slot is there twice or the memory is too small."""
        rooms = np.minimum(num_tokens + np.int32(KEPT_STEPS), np.int32(table.tokens.shape[1]))
        room = int(rooms.sum())
        if num_words + room > EDITED_GRAPH_WORDS or len(set(slots.tolist())) < len(slots):
            return None
        words = self._locked_tokens()[:room]
        np.concatenate(_first_tokens(table, slots, rooms), out=words.numpy())
        lasting.begins, lasting.steps_left = rooms.cumsum(dtype=np.int32) - rooms, KEPT_STEPS
        _point_at_tokens(lasting.edits, table, slots, num_tokens, lasting.begins + np.int32(num_words))
        return Group([words], room, is_locked=True)

    def _locked_tokens(self) -> Tensor:
        if self._tokens is None:
            self._tokens = self._staging.page_locked(EDITED_GRAPH_WORDS)
        return self._tokens

    def _lasting_of(self, slots: IntArray, early: BoolArray, own: npt.NDArray[np.intp]) -> _Lasting:
        """Returns the columns of E edits that stay the same from step to step, because they do not depend on the tokens of the
        sequences. An edit is what one request changes in its row's logits, by penalties, logit_bias and min_tokens.

        slots [E]: the slot of each edit's sequence. early [E]: whether that sequence has fewer tokens than its min_tokens. own [E]:
        the index of the edit's row, counted from the first of the rows whose logits are computed together. If the arguments are
        those of the last call and no slot has a new request, the last result is returned again."""
        whose = slots.tobytes(), early.tobytes(), own.tobytes()
        if self._lasting is None or self._lasting[0] != whose:
            self._lasting = whose, self._lasting_made(slots, early, own)
        return self._lasting[1]

    def _lasting_made(self, slots: IntArray, early: BoolArray, own: npt.NDArray[np.intp]) -> _Lasting:
        num_biases, num_banned = self._num_biases[slots], np.where(early, self._num_banned[slots], 0)
        edits = np.zeros((len(slots), entry.EDIT_WORDS), np.int32)
        edits[:, 0] = own
        edits[:, 4], _ = _ranges(2 * num_biases, 0)
        edits[:, 5] = edits[:, 4] + num_biases
        edits[:, 6], edits[:, 7] = _ranges(num_banned, 2 * int(num_biases.sum()))
        words = [self._biases[slot] for slot in slots.tolist()] + [self._banned[slot] for slot in slots[early].tolist()]
        penalised = self._penalised[slots]
        has_any = bool(penalised.any()), bool(num_biases.any()), bool(num_banned.any())
        return _Lasting(edits, self._penalties[slots].reshape(-1), penalised, np.concatenate((NO_WORDS, *words)), *has_any)

    def _num_tokens(self, edits: LogitEdits, which: slice) -> IntArray:
        """Returns, for each of a step's edits in the slice `which`, the number of tokens to penalise: all of its sequence's tokens
        so far, or 0 if the edit has no penalties."""
        return np.where(self._penalised[edits.slots[which]], edits.positions[which], 0).astype(np.int32)

    def look_up(self, edits: LogitEdits) -> None:
        """Makes the arrays of a step's edits anew for each slot that has another request than when its arrays were made last."""
        given = edits.table.params
        for slot in edits.slots.tolist():
            if self._params[slot] is not given[slot]:
                self._read(slot, given[slot], edits.end_ids, edits.vocab_size)

    def _read(self, slot: int, params: object | None, end_ids: list[int], vocab_size: int) -> None:
        assert params is None or isinstance(params, SamplingParams)
        self._params[slot], self._lasting = params, None
        asked = SamplingParams(1) if params is None else params
        penalties = (asked.presence_penalty, asked.frequency_penalty, asked.repetition_penalty)
        self._penalties[slot, :3], self._penalised[slot] = penalties, penalties != (0.0, 0.0, 1.0)
        ids, biases = np.fromiter(asked.logit_bias, np.int32), np.fromiter(asked.logit_bias.values(), np.float32)
        self._biases[slot] = np.concatenate((ids, biases.view(np.int32)))
        self._banned[slot] = banned_ids(end_ids, params, vocab_size).astype(np.int32)
        self._num_biases[slot], self._num_banned[slot] = len(ids), len(self._banned[slot])


def asking_rows(rows: SamplingRows) -> IntArray:
    """Returns the indices, ascending, of the rows of a step that have edits or a mask, or want log-probabilities."""
    num_rows = len(rows.temperature)
    num_edited = 0 if rows.edits is None else len(rows.edits.rows)
    if num_rows in (num_edited, 0 if rows.allowed is None else len(rows.allowed.rows)):
        return np.arange(num_rows, dtype=np.int32)
    asking = np.zeros(num_rows, np.bool_)
    if rows.edits is not None:
        asking[rows.edits.rows] = True
    if rows.allowed is not None:
        asking[rows.allowed.rows] = True
    if rows.num_top is not None:
        asking |= rows.num_top >= 0
    return np.flatnonzero(asking).astype(np.int32)


def picked_rows(rows: SamplingRows, which: IntArray) -> SamplingRows:
    """Returns the settings of only the rows `which` (indices, ascending). They must include all rows that have edits or a mask."""
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


def _span_of(allowed: RowMasks, masked: slice, own: npt.NDArray[np.intp]) -> _Span | None:
    """Returns the masks of a range that the device copies by itself from page-locked memory. Returns None if the host has to copy
    all masks, because none is page-locked, or because they lie so far apart that the device's copy would take longer. allowed: a
    step's masks, of which those in the slice `masked` belong to the range. own: the rows with these masks, counted from the
    beginning of the range."""
    locked, places = allowed.locked, allowed.places
    if locked is None or places is None or not locked.is_locked:
        return None
    places, others = places[masked], NO_OTHERS
    if not len(places):
        return None
    first, last = int(np.minimum.reduce(places)), int(np.maximum.reduce(places))
    if last < 0:
        return None
    if first < 0:
        there = places >= 0
        others, own, places = np.flatnonzero(~there), own[there], places[there]
        first = int(np.minimum.reduce(places))
    if last - first >= min(MOST_GAPS * len(places), EDITED_ROWS - len(others)):
        return None
    width = locked.bits.shape[1]
    words = locked.bits[first : last + 1].reshape(-1).view(np.int32)
    return _Span(words, own, (places - np.int32(first)) * np.int32(width), others)


def _point_at_tokens(each: IntArray, table: SequenceTable, slots: IntArray, num_tokens: IntArray, begins: IntArray) -> None:
    """Writes to each edit's words [E, EDIT_WORDS] where the tokens of its sequence begin (begins [E]), and where those of the
    output do."""
    each[:, 1], each[:, 2] = begins, begins + np.minimum(table.num_prompt.take(slots), num_tokens)


def _first_tokens(table: SequenceTable, slots: IntArray, nums: IntArray) -> list[IntArray]:
    """Returns the first tokens of the sequence in each slot, as many as `nums` says."""
    return [table.tokens[slot, :num] for slot, num in zip(slots.tolist(), nums.tolist(), strict=True)]


def _within(rows: npt.NDArray[np.intp], first: int, end: int, num_rows: int) -> slice:
    """Returns the slice of `rows` that holds the values from `first` to `end` - 1. rows: ascending indices of some of a step's
    num_rows rows."""
    return slice(None) if end - first == num_rows else slice(*np.searchsorted(rows, (first, end)))


def _ranges(counts: IntArray, first: int) -> tuple[LongArray, LongArray]:
    """Returns the begins and the ends of adjacent ranges. counts: the ranges' lengths. first: where the first range begins."""
    ends: LongArray = np.cumsum(counts, dtype=np.int64) + first
    return ends - counts, ends
