"""The CPU kernels sample the tokens that their reference implementations in torch sample."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from engine.ops import reference
from tests.engine.cpu_ops import ops
from tests.engine.ops.twins import both, random, share_everything

pytest.importorskip("numba")


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("vocab", [1, 31, 1024, 5000])
def test_greedy_takes_the_first_largest(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, vocab: int, threads: int) -> None:
    share_everything(monkeypatch)
    ops.set_num_threads(threads)
    logits = random(9, vocab, dtype=dtype)
    logits[0] = -3.0  # all equal
    logits[1, vocab // 2 :] = 50.0
    logits[2] = torch.finfo(dtype).min
    logits[3] = -logits[3].abs() - 1
    (ids, bad), (wanted, wanted_bad) = both(monkeypatch, lambda: ops.greedy(logits))
    assert ids.tolist() == wanted.tolist() == logits.float().argmax(-1).tolist()
    assert not bad.any()
    assert not wanted_bad.any()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_that_are_not_finite_are_bad_and_no_others(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, value: float, temperature: float
) -> None:
    logits = random(4, 300, dtype=dtype)
    logits[1, 7] = value
    logits[3, 299] = value
    ones = np.ones(4, np.float32)
    keys = np.arange(4, dtype=np.uint32)

    def call() -> Any:
        if temperature == 0.0:
            return ops.greedy(logits)
        return ops.sample(logits, ones, ones, np.zeros(4, np.int32), np.zeros(4, np.float32), keys, keys)

    for _, bad in both(monkeypatch, call):
        assert bad.tolist() == [False, True, False, True]


@pytest.mark.parametrize(
    ("temperature", "top_p", "top_k", "min_p"),
    [
        (1.0, 1.0, 0, 0.0),
        (0.7, 0.9, 0, 0.0),
        (1.5, 1.0, 20, 0.0),
        (0.8, 0.5, 40, 0.0),
        (1e-4, 1.0, 0, 0.0),
        (1.0, 1.0, 0, 0.05),
        (1.2, 0.8, 30, 0.01),
    ],
)
def test_sample_draws_what_the_twin_draws(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, temperature: float, top_p: float, top_k: int, min_p: float
) -> None:
    rows = 200
    logits = random(rows, 700, dtype=dtype, scale=2.0)
    generator = np.random.default_rng(1)
    keys = [generator.integers(0, 2**32, rows, dtype=np.uint32) for _ in range(2)]
    settings = (np.full(rows, temperature, np.float32), np.full(rows, top_p, np.float32), np.full(rows, top_k, np.int32))
    settings += (np.full(rows, min_p, np.float32),)
    (ids, _), (wanted, _) = both(monkeypatch, lambda: ops.sample(logits, *settings, *keys))
    assert (ids != wanted).sum() <= 1  # rounding at a cutoff, or a tie


@pytest.mark.parametrize("vocab", [1, 15, 256, 300, 5000])
@pytest.mark.parametrize("scale", [0.0, 0.5, 2.0, 8.0])
def test_sample_draws_what_the_twin_draws_of_any_vocabulary(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, vocab: int, scale: float
) -> None:
    """The kernel samples the reference implementation's tokens from rows whose tokens are all alike (scale 0) up to rows where few
    tokens matter. Settings differ from row to row."""
    rows = 160
    logits = random(rows, vocab, dtype=dtype, scale=scale) - 3.0
    generator = np.random.default_rng(vocab)
    keys = [generator.integers(0, 2**32, rows, dtype=np.uint32) for _ in range(2)]

    def column(*values: float) -> Any:
        return generator.choice(np.array(values, np.float32), rows)

    top_k = column(0, 0, 1, 3, 19, 20, 21, 300, 4000, 9000).astype(np.int32)
    settings = (column(0.0, 0.4, 1.0, 30.0), column(1.0, 0.97, 0.5, 0.1, 0.0), top_k, column(0.0, 0.0, 0.1, 1.0))
    (ids, bad), (wanted, _) = both(monkeypatch, lambda: ops.sample(logits, *settings, *keys))
    assert not bad.any()
    assert (ids != wanted).sum() <= 1  # rounding at a cutoff, or a tie


@pytest.mark.parametrize("top_p", [0.25, 0.5, 0.75])
def test_top_p_that_parts_likely_tokens_of_equal_weight_is_the_twins(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, top_p: float
) -> None:
    """The kernel sums precisely enough to cut at top_p. Here 1000 tokens have four weights, and the mass of some of these is within
    1 part in 100,000 of top_p, so that rough sums could not tell which tokens are in."""
    rows = 400
    logits = torch.full((rows, 1000), -2.0).to(dtype)
    for weight, share in enumerate((0.0, 0.25, 0.5, 0.75)):
        logits[:, int(1000 * share) :] = -0.0078125 * weight
    generator = np.random.default_rng(5)
    keys = [generator.integers(0, 2**32, rows, dtype=np.uint32) for _ in range(2)]
    exact = torch.exp(logits[0].double()).reshape(4, 250).sum(1)
    mass = float(exact[: int(4 * top_p)].sum() / exact.sum())
    for beside, parts in ((0.99999, int(4 * top_p)), (1.00001, int(4 * top_p) + 1)):
        settings = (np.ones(rows, np.float32), np.full(rows, mass * beside, np.float32))
        settings += (np.zeros(rows, np.int32), np.zeros(rows, np.float32))
        (ids, _), (wanted, _) = both(monkeypatch, lambda settings=settings: ops.sample(logits, *settings, *keys))
        assert (ids != wanted).sum() <= 1
        assert ids.max() // 250 == parts - 1


@pytest.mark.parametrize("threads", [1, 2])
def test_rows_of_temperature_0_take_their_likeliest_among_rows_that_draw(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, threads: int
) -> None:
    share_everything(monkeypatch)
    ops.set_num_threads(threads)
    rows = 40
    logits = random(rows, 700, dtype=dtype)
    logits[3] = -2.0  # all equal
    logits[9, 5] = torch.nan
    generator = np.random.default_rng(1)
    temperature = np.where(np.arange(rows) % 3 == 0, 0.0, 0.9).astype(np.float32)
    keys = [generator.integers(0, 2**32, rows, dtype=np.uint32) for _ in range(2)]
    others = (np.full(rows, 0.9, np.float32), np.zeros(rows, np.int32), np.zeros(rows, np.float32))
    (ids, bad), (wanted, wanted_bad) = both(monkeypatch, lambda: ops.sample(logits, temperature, *others, *keys))
    assert bad.tolist() == wanted_bad.tolist() == [row == 9 for row in range(rows)]
    greedy = (temperature == 0) & ~bad
    assert ids[greedy].tolist() == wanted[greedy].tolist() == ops.greedy(logits)[0][greedy].tolist()
    assert (ids != wanted)[~bad].sum() <= 1


def test_the_least_noise_does_not_pick_a_token_that_may_not_come(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """A token that is ruled out is not sampled even with the smallest noise. With key1 0 and this key0 the hash of `token` is 0,
    which happens once in 2**32 samples."""
    vocab, token = 300, 7
    logits = random(1, vocab, dtype=dtype)
    logits[0, token] = torch.finfo(dtype).min
    key0 = np.array([token * 0x9E3779B1 & 0xFFFFFFFF], np.uint32)
    settings = (np.ones(1, np.float32), np.ones(1, np.float32), np.zeros(1, np.int32), np.zeros(1, np.float32))
    for ids, _ in both(monkeypatch, lambda: ops.sample(logits, *settings, key0, np.zeros(1, np.uint32))):
        assert ids[0] != token


@pytest.mark.parametrize(("vocab", "num_top"), [(5000, 20), (5000, 0), (1025, 5), (7, 20), (1, 1)])
def test_log_probabilities_are_the_twins(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, vocab: int, num_top: int) -> None:
    """Log-probabilities of some rows, in any order, equal those of the reference implementation. Among equal values the lower id
    comes first."""
    logits = random(6, vocab, dtype=dtype, scale=3.0)
    logits[2] = -1.5
    rows, chosen = np.array([4, 2, 0], np.int32), np.array([vocab - 1, vocab // 2, 0], np.int32)
    (picked, top_ids, top), wanted = both(monkeypatch, lambda: ops.top_logprobs(logits, rows, chosen, num_top))
    assert top_ids.shape == (3, min(num_top, vocab))
    assert np.abs(picked - wanted[0]).max() < 2e-6
    assert top_ids.tolist() == wanted[1].tolist()
    if num_top:
        assert np.abs(top - wanted[2]).max() < 2e-6
        exact = torch.log_softmax(logits[rows].double(), -1).numpy()
        assert np.abs(np.take_along_axis(exact, top_ids.astype(np.int64), 1) - top).max() < 2e-6
        assert top_ids[1].tolist() == list(range(min(num_top, vocab)))


def test_penalties_are_the_twins(monkeypatch: pytest.MonkeyPatch, kernels: None) -> None:
    generator = np.random.default_rng(2)
    tokens = generator.integers(0, 300, 200).astype(np.int32)
    row = torch.from_numpy(generator.normal(0, 4, 300).astype(np.float32))
    row[tokens[3]], row[tokens[5]] = torch.nan, torch.inf

    def call() -> Any:
        out = row.clone()
        ops.penalise(out, tokens, 150, 0.4, 0.7, 1.3)
        ops.penalise(out, tokens[:9], 4, -0.4, -0.7, 1e-36)  # the first call must leave no counts behind
        return out.numpy()

    ours, wanted = both(monkeypatch, call)
    assert np.array_equal(ours, wanted, equal_nan=True)
    assert (~np.isfinite(ours)).sum() == 2


def test_hash_is_the_twins(kernels: None) -> None:
    from numba import njit, uint32

    from engine.cpu.kernels.bits import hash32

    @njit
    def run(num: int, key0: int, key1: int) -> Any:
        out = np.empty(num, np.uint32)
        for i in range(num):
            out[i] = hash32(uint32(i), key0, key1)
        return out

    for key0, key1 in ((0, 0), (2**32 - 1, 2**32 - 1), (123456789, 3987654321)):
        wanted = reference.hash32(torch.arange(5000), torch.tensor(key0), torch.tensor(key1))
        assert run(5000, np.uint32(key0), np.uint32(key1)).astype(np.int64).tolist() == wanted.tolist()
