"""What the sampling kernels promise beside the reference implementation's tokens (sampling_cases.py has these)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from triton.runtime import interpreter

from engine.cuda.kernels import triton_sampling
from engine.ops import reference

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU tests/gpu runs the kernels"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy warns of infinities, a GPU does not
]


def drawn(logits: Tensor, settings: tuple[Tensor, ...], **how: Any) -> list[int]:
    ids, bad = (torch.full((len(logits),), -7, dtype=torch.int32) for _ in range(2))
    triton_sampling.sample(logits, *settings, ids, bad, **how)
    assert bad.tolist() == [0] * len(logits)
    return ids.tolist()


def settings_of(rows: int, top_p: float, top_k: int) -> tuple[Tensor, ...]:
    ones, keys = torch.ones(rows), torch.arange(rows)
    return ones, ones * top_p, torch.full((rows,), top_k, dtype=torch.int32), ones * 0.0, keys, keys * 77 + 1


def test_a_row_gets_the_same_token_alone_and_among_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """It depends on sums, whose order must therefore not depend on the other rows."""
    monkeypatch.setattr(triton_sampling, "TILE_TOKENS", 128)
    logits = torch.randn(5, 301, generator=torch.Generator().manual_seed(1))
    settings, written = settings_of(5, 0.9, 0), []
    empty_records = triton_sampling.empty_records
    monkeypatch.setattr(triton_sampling, "empty_records", lambda *a: written.append(empty_records(*a)) or written[-1])
    together = drawn(logits, settings)
    assert len(set(together)) > 2
    for row in (0, 4):
        own = slice(row, row + 1)
        assert drawn(logits[own], tuple(column[own] for column in settings)) == [together[row]]
        masses = [numbers[at, :-1, triton_sampling.MASS.value] for (numbers, _), at in ((written[0], row), (written[-1], 0))]
        assert torch.equal(*masses)


def test_a_front_longer_than_what_is_stored_is_followed_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The front of nearly equal logits leads over many tokens to one of the 20 largest."""
    written: list[tuple[Tensor, Tensor]] = []
    empty_records = triton_sampling.empty_records
    monkeypatch.setattr(triton_sampling, "empty_records", lambda *a: written.append(empty_records(*a)) or written[-1])
    for name, value in (("TILE_TOKENS", 128), ("MOST_FRONT", 2), ("MOST_PIVOTS", 2)):
        monkeypatch.setattr(triton_sampling, name, value)
    logits = torch.randn(4, 200, generator=torch.Generator().manual_seed(2)) * 0.01
    settings = settings_of(4, 1.0, 20)
    ids = drawn(logits, settings)
    assert ids == reference.sample(logits, *settings)[0].tolist()
    (_, integers), first = written[0], triton_sampling.FRONT_PART.value
    stored = [integers[row, -1, first : first + integers[row, -1, triton_sampling.NUM_PIVOTS.value]].tolist() for row in range(4)]
    assert all(stored)
    assert any(ids[row] not in stored[row] for row in range(4))


def test_rows_without_a_cut_take_half_the_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_sampling, "_weigh_kernel", None)
    monkeypatch.setattr(triton_sampling, "_choose_kernel", None)
    logits = torch.randn(4, 300, generator=torch.Generator().manual_seed(3))
    settings = settings_of(4, 1.0, 0)
    assert drawn(logits, settings, is_cut=False) == reference.sample(logits, *settings)[0].tolist()


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> Callable[[Tensor, tuple[Tensor, ...]], float]:
    """Samples rows, and returns how often the kernels have read a logit, on average."""
    builder, num_read, place = type(interpreter.interpreter_builder), [0], [0, 0]
    load = builder.create_masked_load

    def noted(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        at = np.atleast_1d(pointers.data)[np.atleast_1d(mask.data)].astype(np.uint64)
        num_read[0] += int(((at >= place[0]) & (at < place[1])).sum())
        return load(self, pointers, mask, *rest)

    monkeypatch.setattr(builder, "create_masked_load", noted)

    def of(logits: Tensor, settings: tuple[Tensor, ...]) -> float:
        num_read[0], place[:] = 0, [logits.data_ptr(), logits.data_ptr() + logits.nbytes]
        drawn(logits, settings)
        return num_read[0] / logits.numel()

    return of


ROWS, VOCAB = 3, 10 * triton_sampling.TILE_TOKENS


def test_a_row_is_read_once_where_nothing_is_cut(passes: Callable[[Tensor, tuple[Tensor, ...]], float]) -> None:
    """Greedy rows, and rows with a temperature or min_p, need no second pass over the vocabulary."""
    logits = torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(3))
    temperature, *rest, min_p, key0, key1 = settings_of(ROWS, 1.0, 0)
    for warmth, floor in ((0.0, 0.0), (1.0, 0.0), (1.0, 0.2)):
        assert passes(logits, (temperature * warmth, *rest, min_p + floor, key0, key1)) == 1.0


def test_a_row_is_read_twice_at_most_and_only_where_heavier_tokens_are(
    passes: Callable[[Tensor, tuple[Tensor, ...]], float],
) -> None:
    """Normal logits have heavier tokens in every tile, and logits that fall as Zipf's law says in one or two of ten. For top_k with
    top_p the k-th weight is searched before, by one look at fewer than k stripes; by some more where there are more heavier tokens
    than stripes, of which this vocabulary has 320."""
    generator, top_k = torch.Generator().manual_seed(4), 20
    normal = torch.randn(ROWS, VOCAB, generator=generator)
    falling = -torch.log(1.0 + torch.arange(VOCAB)).repeat(ROWS, 1)
    for top_p, k in ((0.9, 0), (1.0, top_k)):
        assert passes(normal, settings_of(ROWS, top_p, k)) <= 2.0
        assert passes(falling, settings_of(ROWS, top_p, k)) <= 1.2
    stripe = triton_sampling.TILE_TOKENS // triton_sampling.LANES
    for k, looks in ((20, 1), (150, 1), (300, 4), (400, 10)):
        for logits in (normal, falling, falling.flip(1).bfloat16()):
            assert passes(logits, settings_of(ROWS, 0.9, k)) <= 2.0 + looks * min(1.0, (k - 1) * stripe / VOCAB), k


@pytest.mark.parametrize("shape", ["normal", "ties", "equal", "one stripe", "underflow"])
def test_the_weight_of_the_kth_token_is_found_for_any_k(monkeypatch: pytest.MonkeyPatch, shape: str) -> None:
    """The list of heavier tokens has room for 320: others are found by further looks. It is left in the row's record."""
    written: list[tuple[Tensor, Tensor]] = []
    empty_records = triton_sampling.empty_records
    monkeypatch.setattr(triton_sampling, "empty_records", lambda *a: written.append(empty_records(*a)) or written[-1])
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(5))
    match shape:
        case "ties":
            logits = logits.mul(2).round()
        case "equal":
            logits = torch.zeros(1, VOCAB)
        case "one stripe":
            logits[:, 1024:1152] += 20.0
        case "underflow":
            logits[:, :100] += 200.0
    weights = np.sort(np.exp(logits[0].numpy() - logits.max().item()))
    for k in (1, 2, 20, 127, 300, 321, 5000, VOCAB - 1):
        drawn(logits, settings_of(1, 0.9, k))
        numbers = written[-1][0]
        assert numbers[0, -1, triton_sampling.CUTOFF.value].item() == weights[-k], k
