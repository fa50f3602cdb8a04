"""Masks of single rows keep the allowed logits, and end ids are held back unless nothing else is allowed."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from engine.grammar.compile import compile_grammar
from engine.grammar.row_masks import LockedMasks, RowMasks, allows_others, hold_ends_back
from engine.grammar.token_limits import TokenLimits
from engine.protocol import SamplingParams
from engine.sampling.sampler import constrain, sampling_rows
from engine.sampling.token_mask import ROWS_AT_ONCE, apply_row_masks
from engine.serve.constraints import Constraints
from tests.engine.model_bench import make_table, plan


def bits_of(*ids: int, words: int = 3) -> np.ndarray:
    bits = np.zeros(words, np.uint32)
    for each in ids:
        bits[each >> 5] |= np.uint32(1 << (each & 31))
    return bits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_what_is_allowed_stays(dtype: torch.dtype) -> None:
    vocab = 70
    logits = torch.randn(4, vocab, generator=torch.Generator().manual_seed(1)).to(dtype)
    logits[1, 5] = torch.nan
    logits[1, 6] = torch.inf
    before = logits.clone()
    masks = RowMasks([7, 8, 9], np.array([2, 11, 13]), [bits_of(1), bits_of(3, 69), bits_of(0, 31, 32)])
    apply_row_masks(logits, masks, 10)  # sampling rows 10 to 13
    assert torch.equal(logits[0], before[0])
    assert torch.equal(logits[2], before[2])
    least = torch.finfo(dtype).min
    kept = [i for i in range(vocab) if logits[3, i] != least]
    assert kept == [0, 31, 32]
    assert torch.equal(logits[3, kept], before[3, kept])
    assert [i for i in range(vocab) if logits[1, i] != least] == [3, 5, 6, 69]
    assert logits[1, 5].isnan()
    assert logits[1, 6].isinf()


def test_more_rows_than_are_done_at_once() -> None:
    num = 2 * ROWS_AT_ONCE + 3
    logits = torch.zeros(num, 70)
    masks = RowMasks(list(range(num)), np.arange(num), [bits_of(i) for i in range(num)])
    apply_row_masks(logits, masks, 0)
    assert logits.argmax(-1).tolist() == list(range(num))


def test_ends_are_held_back_unless_nothing_else_is_left() -> None:
    bits = bits_of(3, 40, 64)
    hold_ends_back(bits, [40, 64, 5000])
    assert bits.tolist() == bits_of(3).tolist()
    bits = bits_of(40)
    hold_ends_back(bits, [40])
    assert bits.tolist() == bits_of(40).tolist()


def test_other_tokens_are_found_in_the_same_word_and_in_others() -> None:
    assert allows_others(bits_of(40, 41), [40])
    assert allows_others(bits_of(2, 40), [40, 41])
    assert allows_others(bits_of(64), [])
    assert not allows_others(bits_of(40), [40])
    assert not allows_others(bits_of(3, 31, 40), [40, 3, 31, 40, 5000, -1])
    assert not allows_others(bits_of(), [40])


def test_masks_lie_where_they_were_written_unless_ends_are_held_back() -> None:
    """What a grammar's process has written stays as it is, and only a row that differs from it takes memory of its own."""
    written = np.stack([bits_of(3, 7, 40), bits_of(3, 8), bits_of(7)])[:, np.newaxis]
    asked = (SamplingParams(9, min_tokens=5, stop_token_ids=[40]), SamplingParams(9), SamplingParams(9, min_tokens=5))
    by_id = {100 + row: SimpleNamespace(row=row, params=params, output=[1]) for row, params in enumerate(asked)}
    constraints, table = Constraints(), make_table(slots=3)
    grammars: Any = SimpleNamespace(by_id=by_id, port=SimpleNamespace(masks=written.copy(), locked=None))
    constraints._models["m"] = grammars
    table.request_id[:], table.constrained[:] = (100, 101, 102), True
    spec = SimpleNamespace(model="m", eos_token_ids=[3])
    served: Any = SimpleNamespace(spec=spec, scheduler=SimpleNamespace(table=table))
    masks = constraints.masks(served, plan((0, 6, 1), (1, 6, 1), (2, 6, 1)))
    assert masks is not None
    assert [bits.tolist() for bits in masks.bits] == [bits_of(7).tolist(), bits_of(3, 8).tolist(), bits_of(7).tolist()]
    assert (grammars.port.masks == written).all()
    assert [np.shares_memory(bits, grammars.port.masks) for bits in masks.bits] == [False, True, True]
    assert masks.banning is None


def test_devices_that_copy_masks_ban_end_ids_unless_nothing_else_is_left() -> None:
    """Before min_tokens such a row's mask stays where it was written. With ignore_eos, and where the sampler would not ban, end ids
    are taken out of a copy; a mask of end ids alone, or of none, stays as it is."""
    written = np.stack([bits_of(3, 7, 40), bits_of(3), bits_of(7), bits_of(3, 8), bits_of(3, 7), bits_of(3, 7)])[:, np.newaxis]
    early = SamplingParams(9, min_tokens=5, stop_token_ids=[40])
    asked = (early, early, early, SamplingParams(9, ignore_eos=True), SamplingParams(9), early)
    by_id = {100 + row: SimpleNamespace(row=row, params=params, output=[1]) for row, params in enumerate(asked)}
    constraints, table = Constraints(), make_table(slots=6)
    locked = LockedMasks(written[:, 0])
    grammars: Any = SimpleNamespace(by_id=by_id, port=SimpleNamespace(masks=written, locked=locked))
    constraints._models["m"] = grammars
    table.request_id[:], table.constrained[:] = range(100, 106), True
    table.min_tokens_until[:] = 8
    table.min_tokens_until[5] = 7  # not above the position of the token that is sampled, unlike the grammar's own count
    spec = SimpleNamespace(model="m", eos_token_ids=[3])
    served: Any = SimpleNamespace(spec=spec, scheduler=SimpleNamespace(table=table))
    masks = constraints.masks(served, plan(*((slot, 6, 1) for slot in range(6))))
    assert masks is not None
    assert masks.places is not None
    assert masks.banning is not None
    assert masks.places.tolist() == [0, 1, 2, -1, 4, -1]
    assert masks.banning.tolist() == [True, False, False, False, False, False]
    wanted = [bits_of(3, 7, 40), bits_of(3), bits_of(7), bits_of(8), bits_of(3, 7), bits_of(7)]
    assert [bits.tolist() for bits in masks.bits] == [bits.tolist() for bits in wanted]
    rows = sampling_rows(plan(*((slot, 6, 1) for slot in range(6))), table, [3], 96)
    assert rows.edits is not None
    constrain(rows, masks)
    assert dict(zip(rows.edits.rows.tolist(), rows.edits.early.tolist(), strict=True)) == {at: at == 0 for at in range(5)}


def test_masks_are_told_to_lie_in_page_locked_memory_only_where_they_do() -> None:
    """Not so are those that ends are taken out of, those that limits change, those behind a draft, and rows that are not
    page-locked."""
    written = np.zeros((2, 5, 3), np.uint32).swapaxes(0, 1)  # [rows, drafted tokens before, words]
    written[:, :, 0] = 1 << 7 | 1 << 8
    asked = [SamplingParams(9), SamplingParams(9, min_tokens=5), SamplingParams(9), SamplingParams(9), SamplingParams(9)]
    by_id = {100 + row: SimpleNamespace(row=4 - row, params=params, output=[1]) for row, params in enumerate(asked)}
    constraints, table = Constraints(), make_table(slots=5)
    locked = LockedMasks(written[:4, 0])
    grammars: Any = SimpleNamespace(by_id=by_id, port=SimpleNamespace(masks=written, locked=locked))
    constraints._models["m"] = grammars
    constraints._limits[102] = TokenLimits("m", SamplingParams(9, bad_words=[[7]]), 96, [])
    table.request_id[:], table.constrained[:] = range(100, 105), True
    spec = SimpleNamespace(model="m", eos_token_ids=[8])
    served: Any = SimpleNamespace(spec=spec, scheduler=SimpleNamespace(table=table))
    masks = constraints.masks(served, plan(*((slot, 6, 1) for slot in range(5))))
    assert masks is not None
    assert masks.locked is locked
    assert masks.places is not None
    assert masks.places.tolist() == [-1, -1, -1, 1, 0]
    assert all(np.shares_memory(masks.bits[at], locked.bits[1 - (at - 3)]) for at in (3, 4))
    step = plan((3, 6, 1), (3, 7, 1))
    step.drafted, table.num_tokens[3] = True, 7
    masks = constraints.masks(served, step)
    assert masks is not None
    assert masks.places is not None
    assert masks.places.tolist() == [1, -1]


def test_times_have_no_leap_second() -> None:
    schema = '{"properties":{"at":{"type":"string","format":"date-time"},"x":{"const":{"format":"time"}}}}'
    compiled = compile_grammar("json_schema:" + schema)
    assert len(re.findall(r"\[0-5\]", compiled)) == 1, "constants are no schemas"
    assert compile_grammar('json_schema:{"title":"1.50"}').count("1.50") == 1


def test_a_schema_nested_too_deeply_is_a_value_error() -> None:
    deep = '{"items":' * 20000 + '{"format":"time"}' + "}" * 20000
    with pytest.raises(ValueError, match="nested"):
        compile_grammar("json_schema:" + deep)
