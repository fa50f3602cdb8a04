"""Rows that a GPU edits and samples behind a step get what the host gives them, whatever parts they are computed in, and more of
them take no more launches."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from engine.cuda import edit_columns, edited
from engine.cuda.edited import EditedSampling
from engine.cuda.kernels import entry
from engine.grammar.row_masks import LockedMasks, RowMasks
from engine.protocol import SamplingParams
from engine.sampling.outputs import sampled_outputs
from engine.sampling.sampler import SamplingRows, constrain, sampling_rows
from scheduler.batch.plan import BatchPlan, SequenceTable, write_sampling
from tests.engine.cpu_ops import ops
from tests.engine.model_bench import make_table, plan

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU tests/gpu runs the kernels"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy warns of infinities, a GPU does not
]
VOCAB, ROWS, LENGTH, EOS = 70, 9, 40, [3, 900]
SETTINGS = [
    SamplingParams(99, temperature=0.9, seed=1),
    SamplingParams(99, temperature=0.8, seed=2, repetition_penalty=1.4, presence_penalty=0.3, logprobs=4),
    SamplingParams(99, temperature=0.0, frequency_penalty=1.5, logit_bias={4: 9.0, 69: 8.5}),
    SamplingParams(99, temperature=0.0, min_tokens=60, stop_token_ids=[7, 4], logit_bias={7: 90.0}, logprobs=0),
    SamplingParams(99, temperature=1.1, seed=3, min_tokens=60, frequency_penalty=-0.5, top_k=30, logprobs=5),
    SamplingParams(99, temperature=0.0, logprobs=2),
]


@pytest.fixture(autouse=True)
def _reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "kernels", None)


def table_of(num_rows: int, settings: list[SamplingParams]) -> SequenceTable:
    table = make_table(slots=num_rows, length=LENGTH)
    table.request_id[:] = np.arange(100, 100 + num_rows)
    table.tokens[:] = np.random.default_rng(1).integers(0, VOCAB, table.tokens.shape)
    for slot in range(num_rows):
        table.num_prompt[slot] = 5
        write_sampling(table, slot, settings[slot % len(settings)], 5, LENGTH)
    return table


def rows_of(step: BatchPlan, table: SequenceTable, masked: list[int], places: list[int] | None = None) -> SamplingRows:
    rows = sampling_rows(step, table, EOS, VOCAB)
    if masked:
        bits = np.random.default_rng(2).integers(0, 2**32, (len(masked), -(-VOCAB // 32)), np.uint32)
        elsewhere = RowMasks([1] * len(masked), np.array(masked), list(bits))
        constrain(rows, elsewhere if places is None else locked(masked, bits, places))
    return rows


def locked(masked: list[int], bits: Any, places: list[int]) -> RowMasks:
    """Returns masks that lie in page-locked memory at these places, -1 for those that lie elsewhere. What lies between is full of
    other masks."""
    there = np.full((ROWS * 3, bits.shape[1]), 0xAAAAAAAA, np.uint32)
    own = [bits[at] if place < 0 else there[place] for at, place in enumerate(places)]
    for at, mask in enumerate(own):
        mask[:] = bits[at]
    return RowMasks([1] * len(masked), np.array(masked), own, LockedMasks(there), np.array(places, np.int32))


def by_device(
    hidden: torch.Tensor,
    step: BatchPlan,
    table: SequenceTable,
    masked: list[int],
    drawn: Any = None,
    places: list[int] | None = None,
) -> Any:
    last_ids = torch.full((len(table.request_id) + 1,), -7, dtype=torch.int32)
    sampling, rows = EditedSampling(VOCAB, len(table.request_id), last_ids), rows_of(step, table, masked, places)
    draw = sampling.draw(hidden, rows, step.slots, table.request_id[step.slots], drawn, lambda x: x.clone())
    result = draw.result(draw.told, 0.5)
    if drawn is None:
        assert last_ids[torch.from_numpy(step.slots).long()].tolist() == result.ids.tolist()
    else:
        assert last_ids.tolist() == [-7] * len(last_ids)
    return result


def by_host(hidden: torch.Tensor, step: BatchPlan, table: SequenceTable, masked: list[int]) -> Any:
    rows = rows_of(step, table, masked)
    return sampled_outputs(ops, hidden, len(step.slots), rows, None, step, table, lambda x: x.clone(), 256, 0.0)


def equal(ours: Any, wanted: Any) -> None:
    assert ours.ids[~ours.bad].tolist() == wanted.ids[~wanted.bad].tolist()
    assert ours.bad.tolist() == wanted.bad.tolist()
    assert (ours.logprobs is None) == (wanted.logprobs is None)
    if wanted.logprobs is not None:
        for name in ("request_ids", "counts", "top_ids"):
            assert getattr(ours.logprobs, name) == getattr(wanted.logprobs, name), name
        assert np.abs(np.array(ours.logprobs.chosen) - np.array(wanted.logprobs.chosen)).max() < 1e-5
        assert np.abs(np.array(ours.logprobs.top) - np.array(wanted.logprobs.top)).max(initial=0) < 1e-5


@pytest.mark.parametrize(
    ("parts", "masked", "dtype"),
    [((64, 1 << 20, 256), [1], torch.float32), ((3, 30, 8), [0, 1, 4, 6, 8], torch.bfloat16), ((5, 1, 4), [], torch.float16)],
)
def test_rows_get_what_the_host_gives_them(
    monkeypatch: pytest.MonkeyPatch, parts: tuple[int, int, int], masked: list[int], dtype: torch.dtype
) -> None:
    for name, value in zip(("EDITED_ROWS", "EDITED_TOKENS", "LOGITS_ROWS"), parts, strict=True):
        monkeypatch.setattr(edit_columns, name, value)
    monkeypatch.setattr(edited, "LOGITS_ROWS", parts[2])
    hidden = (torch.randn(ROWS + 2, VOCAB, generator=torch.Generator().manual_seed(3)) * 3).to(dtype)
    hidden[7, 20] = torch.nan  # a row with log-probabilities
    table = table_of(ROWS, SETTINGS)
    step = plan(*((slot, 11 + slot, 1) for slot in reversed(range(ROWS))))
    wanted = by_host(hidden, step, table, masked)
    assert wanted.bad.tolist() == [row == 7 for row in range(ROWS)]
    equal(by_device(hidden, step, table, masked), wanted)


@pytest.mark.parametrize(
    ("places", "most_rows", "copied"),
    [
        ([3, 4, 5, 6, 7], 64, [5]),
        ([7, 3, -1, 5, 4], 64, [5]),
        ([8, -1, -1, -1, -1], 64, [1]),
        ([0, 9, 2, 4, 6], 64, [10]),
        ([0, 10, 2, 4, 6], 64, []),  # a span of more than twice as many masks takes the device longer than the host
        ([-1] * 5, 64, []),
        ([3, 4, 5, 6, 7], 4, [2, 2, 1]),  # of rows in parts, which begin at 0, 4 and 8
        ([2, 0, -1, 4, 5], 3, [3, 2]),
        ([3, 0, -1, 4, 5], 3, [2]),  # a part has room for the masks of three rows
    ],
)
def test_masks_in_page_locked_memory_are_copied_by_the_device(
    monkeypatch: pytest.MonkeyPatch, places: list[int], most_rows: int, copied: list[int]
) -> None:
    """The rows get what the host gives them, and the device copies the spans of so many masks."""
    monkeypatch.setattr(edit_columns, "EDITED_ROWS", most_rows)
    spans: list[int] = []
    copy = edited.Staging.copy

    def noted(self: Any, columns: Any, *arguments: Any) -> Any:
        spans.extend(group.num_words // 3 for group in columns["words"] if group.is_locked)
        return copy(self, columns, *arguments)

    monkeypatch.setattr(edited.Staging, "copy", noted)
    hidden = torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(3)) * 3
    table, masked = table_of(ROWS, SETTINGS), [0, 1, 4, 6, 8]
    step = plan(*((slot, 11 + slot, 1) for slot in reversed(range(ROWS))))
    equal(by_device(hidden, step, table, masked, None, places), by_host(hidden, step, table, masked))
    assert spans == copied


def test_masks_whose_memory_is_given_up_are_copied_by_the_host() -> None:
    """They may be those of a process that has died before a step that has them was launched."""
    table, known = table_of(3, SETTINGS), edit_columns.KnownEdits(3, edited.Staging(torch.device("cpu")))
    rows = rows_of(plan((0, 9, 1), (1, 9, 1), (2, 9, 1)), table, [0, 1], [0, 1])
    assert rows.edits is not None
    assert rows.allowed is not None
    assert rows.allowed.locked is not None
    known.look_up(rows.edits)
    assert [group.is_locked for group in known.part(rows, 0, 3).words if group.num_words] == [False, False, True]
    rows.allowed.locked.is_locked = False
    assert not any(group.is_locked for group in known.part(rows, 0, 3).words)


def test_a_slot_that_another_request_takes_over_is_edited_as_that_asks() -> None:
    hidden, step = torch.zeros(1, VOCAB), plan((0, 10, 1))
    table = table_of(1, [SamplingParams(99, temperature=0.0, logit_bias={40: 5.0})])
    sampling, ids = EditedSampling(VOCAB, 1, torch.zeros(2, dtype=torch.int32)), []
    for token in (40, 41, 41):
        write_sampling(table, 0, SamplingParams(99, temperature=0.0, logit_bias={token: 5.0}), 5, LENGTH)
        draw = sampling.draw(hidden, rows_of(step, table, []), step.slots, table.request_id[:1], None, torch.clone)
        ids += draw.result(draw.told, 0.0).ids.tolist()
    assert ids == [40, 41, 41]


def test_what_lasts_of_edits_is_made_anew_when_rows_requests_or_bans_change() -> None:
    """The same object edits steps of other rows, of rows in another order, of another request in a slot, and of rows whose end ids
    are not forbidden any more."""
    table, sampling = table_of(3, SETTINGS[1:4]), EditedSampling(VOCAB, 3, torch.zeros(4, dtype=torch.int32))
    hidden = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(6)) * 3

    def same(masked: list[int], *rows: tuple[int, int, int]) -> None:
        step = plan(*rows)
        request_ids = table.request_id[step.slots]
        draw = sampling.draw(hidden, rows_of(step, table, masked), step.slots, request_ids, None, torch.clone)
        equal(draw.result(draw.told, 0.0), by_host(hidden, step, table, masked))

    same([], (0, 20, 1), (1, 20, 1), (2, 20, 1))
    same([1], (0, 21, 1), (1, 21, 1), (2, 21, 1))
    same([], (2, 22, 1), (1, 22, 1), (0, 22, 1))
    same([], (2, 23, 1), (1, 23, 1))
    table.min_tokens_until[2] = 24  # what slot 2 bans until then
    same([], (2, 23, 1), (1, 23, 1))
    same([], (2, 24, 1), (1, 24, 1))
    write_sampling(table, 1, SamplingParams(99, temperature=0.0, logit_bias={50: 30.0}, frequency_penalty=0.1), 5, LENGTH)
    same([], (2, 24, 1), (1, 24, 1))
    table.tokens[1] = table.tokens[2, ::-1]  # of a request that takes the slot over with the same parameters
    same([], (2, 24, 1), (1, 24, 1))


TOKENS = [
    SamplingParams(99, temperature=0.0, frequency_penalty=1.5, repetition_penalty=1.2),
    SamplingParams(99, temperature=0.0, logit_bias={4: 2.0, 69: 1.5}),
    SamplingParams(99, temperature=0.0, presence_penalty=0.9, min_tokens=99, stop_token_ids=[7]),
]


@pytest.mark.parametrize(("most_words", "kept"), [(1 << 18, [0, 0, 1, 1, 1, 1, 1, 1, 1]), (60, [0] * 9)])
def test_tokens_of_sequences_that_go_on_are_copied_by_the_device(
    monkeypatch: pytest.MonkeyPatch, most_words: int, kept: list[int]
) -> None:
    """The host copies them in the first step, which is launched twice here, and where they take too much room."""
    monkeypatch.setattr(edit_columns, "EDITED_GRAPH_WORDS", most_words)
    monkeypatch.setattr(edit_columns, "KEPT_STEPS", 3)
    locked: list[int] = []
    copy = edited.Staging.copy

    def noted(self: Any, columns: Any, *arguments: Any) -> Any:
        locked.append(sum(group.is_locked for group in columns["words"]))
        return copy(self, columns, *arguments)

    monkeypatch.setattr(edited.Staging, "copy", noted)
    table, sampling = table_of(3, TOKENS), EditedSampling(VOCAB, 3, torch.zeros(4, dtype=torch.int32))
    hidden = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(6))
    for at in (30, 30, 31, 32, 33, 34, 35, 36, 37):
        step = plan((2, at, 1), (1, at - 9, 1), (0, at - 4, 1))
        draw = sampling.draw(hidden, rows_of(step, table, []), step.slots, table.request_id[step.slots], None, torch.clone)
        equal(draw.result(draw.told, 0.0), by_host(hidden, step, table, []))
    assert locked == kept


def test_tokens_are_right_whatever_the_rows_of_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """At random, a sequence goes on, is left out, has for some steps drafted tokens, all of which others replace, or gives its slot
    to a request with the same settings, often one that has just one token more; and the host copies a mask before the tokens."""
    monkeypatch.setattr(edit_columns, "KEPT_STEPS", 4)
    random, num_kept, lengths = np.random.default_rng(8), 0, [10, 11, 12]
    table, sampling = table_of(3, TOKENS), EditedSampling(VOCAB, 3, torch.zeros(4, dtype=torch.int32))
    hidden = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(6)).expand(9, -1) * 0.1
    likely = hidden[0].topk(15).indices.int().numpy()  # tokens of these alone, so that their penalties decide
    for number in range(200):
        rows = []
        for slot in range(3):
            ended = lengths[slot] > LENGTH - 6
            if ended or random.random() < 0.05:
                lengths[slot] = 10 if ended or random.random() < 0.2 else lengths[slot]
                table.request_id[slot], table.tokens[slot] = 1000 + number, random.choice(likely, LENGTH)
            if random.random() < 0.985:
                num_drafted = 1 if slot == number // 8 % 12 else 0
                rows += [(slot, lengths[slot] - 1 + at, 1) for at in range(1 + num_drafted)]
        step = plan(*(rows or [(1, lengths[1] - 1, 1)]))
        masked = [0] if random.random() < 0.05 else []
        draw = sampling.draw(hidden, rows_of(step, table, masked), step.slots, table.request_id[step.slots], None, torch.clone)
        equal(draw.result(draw.told, 0.0), by_host(hidden, step, table, masked))
        lasting = sampling._known._lasting
        num_kept += lasting is not None and lasting[1].tokens is not None
        for slot in set(step.slots.tolist()):
            table.tokens[slot, lengths[slot] :] = random.choice(likely, LENGTH - lengths[slot])
            lengths[slot] += 1
    assert 50 < num_kept < 150


def test_what_the_step_has_sampled_is_not_sampled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind a graph, rows that want nothing but log-probabilities keep the tokens that it has sampled."""
    monkeypatch.setattr(entry, "sample", None)
    hidden = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(4))
    table, step = table_of(2, [SamplingParams(99, temperature=0.0, logprobs=300)]), plan((0, 10, 1), (1, 10, 1))
    drawn = torch.stack((hidden[:2].argmax(-1), torch.zeros(2, dtype=torch.long))).int()
    equal(by_device(hidden, step, table, [], drawn), by_host(hidden, step, table, []))


def test_more_edited_rows_take_no_more_launches_and_no_more_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    def recorded(where: Any, name: str) -> None:
        call = getattr(where, name)

        def record(*arguments: Any, **options: Any) -> Any:
            done.append(name)
            return call(*arguments, **options)

        monkeypatch.setattr(where, name, record)

    kernels = ("widen", "add_biases_and_count", "penalise_and_ban", "sample", "set_entries", "top_logprobs")
    for name in kernels:
        recorded(entry, name)
    recorded(edited.Staging, "send")
    hidden = torch.randn(9, VOCAB, generator=torch.Generator().manual_seed(5))
    for num_rows in (3, 9):
        done.clear()
        table, masked = table_of(num_rows, SETTINGS), list(range(0, num_rows, 2))
        step = plan(*((slot, 9, 1) for slot in range(num_rows)))
        sampling = EditedSampling(VOCAB, num_rows, torch.zeros(num_rows + 1, dtype=torch.int32))
        sampling.draw(hidden, rows_of(step, table, masked), step.slots, table.request_id, None, torch.clone)
        assert sorted(done) == sorted([*kernels, "send"])
