"""The CPU kernels that fill a recorded step's inputs give the results of their reference implementations."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from engine.ops import reference_inputs
from engine.ops.step_counts import APART, ATTENDED, GREEDY, NUM_COUNTS, ROWS, SAMPLING, TOKENS

pytest.importorskip("numba")
SLOTS, LENGTH, MAX_ROWS, MAX_TOKENS = 30, 200, 24, 300


def step(seed: int) -> tuple[np.random.Generator, np.ndarray, np.ndarray, np.ndarray]:
    """Returns a generator, and the counts, slots and computed positions of a random step. Entries after the step's own rows hold
    leftovers of an earlier step."""
    generator = np.random.default_rng(seed)
    num_rows = int(generator.integers(1, MAX_ROWS + 1))
    counts = np.array([num_rows, *generator.integers(0, 99, NUM_COUNTS - 1)], np.int64)
    assert (ROWS, TOKENS) == (0, 1)
    slots = generator.permutation(SLOTS)[:MAX_ROWS].astype(np.int32)
    return generator, counts, slots, generator.integers(0, LENGTH, MAX_ROWS).astype(np.int32)


def both(name: str, given: tuple[Any, ...], *out: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    """Returns each of `out` twice: as the kernel fills it and as its reference implementation does."""
    from engine.cpu.kernels import inputs

    copies = [[array.copy() for array in out] for _ in range(2)]
    for module, own in zip((inputs, reference_inputs), copies, strict=True):
        getattr(module, name)(*given, *own)
    return list(zip(*copies, strict=True))


def chunks(generator: np.random.Generator, counts: np.ndarray, computed: np.ndarray, decode: bool) -> np.ndarray:
    """Returns the number of new tokens of each row and sets counts[TOKENS]. No row becomes longer than a sequence may be."""
    num_new = np.ones(MAX_ROWS, np.int32)
    if not decode:
        some = generator.random(MAX_ROWS) < 0.4
        num_new[some] = np.minimum(generator.integers(1, 40, some.sum()), LENGTH - computed[some])
        while num_new[: counts[ROWS]].sum() > MAX_TOKENS:
            num_new[num_new.argmax()] = 1
    counts[TOKENS] = num_new[: counts[ROWS]].sum()
    return num_new


@pytest.mark.parametrize("decode", [True, False], ids=["decode", "chunks"])
@pytest.mark.parametrize("seed", range(20))
def test_tokens_and_their_blocks(seed: int, decode: bool) -> None:
    generator, counts, slots, computed = step(seed)
    num_new = chunks(generator, counts, computed, decode)
    num_rows, num_tokens = counts[ROWS], counts[TOKENS]
    tokens = generator.integers(0, 1000, (SLOTS, LENGTH)).astype(np.int32)
    left = generator.integers(0, 99, MAX_TOKENS).astype(np.int32)
    out = (left.astype(np.int64), left, left[:MAX_ROWS], left[:MAX_ROWS], left, left)
    counted = []
    for module in (pytest.importorskip("engine.cpu.kernels.inputs"), reference_inputs):
        own = counts.copy(), *(array.copy() for array in out)
        module.step_tokens(own[0], slots, computed, num_new, 16, tokens, *own[1:])
        counted.append(own)
    for kernel, twin in zip(*counted, strict=True):
        assert np.array_equal(kernel, twin)
    after, ids, positions, starts, contexts, rows, paged = counted[0]
    at = attended = 0
    for row in range(num_rows):
        new, first = int(num_new[row]), int(computed[row])
        of_row = slice(at, at + new)
        assert (starts[row], contexts[row]) == (at, first + new)
        assert positions[of_row].tolist() == list(range(first, first + new))
        assert ids[of_row].tolist() == tokens[slots[row], first : first + new].tolist()
        assert rows[of_row].tolist() == [row] * new
        assert paged[of_row].tolist() == ([-1] * new if new > 16 else list(range(first + 1, first + new + 1)))
        at, attended = at + new, attended + new * (first + new)
    assert after[ATTENDED] == attended
    assert not paged[num_tokens:].any(), "padding attends to nothing"
    assert not rows[num_tokens:].any()

    block_tokens = int(generator.integers(1, 33))
    tables = generator.integers(-1, 1 << 20, (SLOTS, LENGTH // block_tokens + 1)).astype(np.int32)
    kept = np.full((MAX_ROWS, tables.shape[1] + 3), -7, np.int32)
    given = (counts, slots, contexts, positions, rows, tables, block_tokens)
    block_table, places = both("step_blocks", given, kept, left.astype(np.int64))
    assert np.array_equal(*places)
    assert (places[0][num_tokens:] == -1).all(), "padding stores nothing"
    for row in range(num_rows):
        own_blocks = -(-int(contexts[row]) // block_tokens)
        for table in block_table:
            assert np.array_equal(table[row, :own_blocks], tables[slots[row], :own_blocks])
    for token in range(num_tokens):
        block = int(tables[slots[rows[token]], positions[token] // block_tokens])
        assert places[0][token] == block * block_tokens + positions[token] % block_tokens


@pytest.mark.parametrize("decode", [True, False], ids=["decode", "chunks"])
@pytest.mark.parametrize("seed", range(20))
def test_settings_and_noise_of_the_rows_that_sample(seed: int, decode: bool) -> None:
    generator, counts, slots, computed = step(seed)
    num_new = chunks(generator, counts, computed, decode)
    starts = (np.cumsum(num_new) - num_new).astype(np.int32)
    shares = (0.0, 0.5, 1.0)

    def some(num: int = SLOTS) -> np.ndarray:
        return generator.random(num) < shares[generator.integers(3)]

    samples = some(MAX_ROWS) | decode
    temperature = np.where(some(), 0.0, generator.random(SLOTS)).astype(np.float32)
    others = (generator.random(SLOTS).astype(np.float32), generator.integers(0, 99, SLOTS).astype(np.int32))
    settings = (temperature, *others, generator.random(SLOTS).astype(np.float32))
    seeds = generator.integers(0, 2**64, SLOTS, dtype=np.uint64, endpoint=False)
    told = np.where(some(), 3, -1).astype(np.int32), np.where(some(), LENGTH // 2, 0).astype(np.int32), some(), some()
    floats, ints, keys = (np.zeros(MAX_ROWS, kind) for kind in (np.float32, np.int32, np.uint32))
    given = (slots, computed, num_new, starts, samples, *settings, seeds, *told)
    out = []
    for module in (pytest.importorskip("engine.cpu.kernels.inputs"), reference_inputs):
        own = (
            counts.copy(),
            floats.copy(),
            floats.copy(),
            ints.copy(),
            floats.copy(),
            keys.copy(),
            keys.copy(),
            keys.astype(np.int64),
        )
        module.sampling_settings(own[0], *given, *own[1:])
        out.append(own)
    for kernel, twin in zip(*out, strict=True):
        assert kernel.dtype == twin.dtype
        assert np.array_equal(kernel, twin)
    after, num_rows = out[0][0], counts[ROWS]
    sampling = np.flatnonzero(samples[:num_rows])
    rows = slots[sampling]
    assert after[SAMPLING] == len(rows)
    assert after[GREEDY] == (temperature[rows] == 0).sum()
    assert np.array_equal(out[0][1][: len(rows)], temperature[rows])
    wants = (told[0][rows] >= 0) | told[2][rows] | ((computed + num_new)[sampling] < told[1][rows])
    assert after[APART] == wants.sum() + told[3][slots[:num_rows]].sum()
    last = out[0][-1]
    assert last[: len(rows)].tolist() == (starts + num_new - 1)[sampling].tolist()
    assert not last[len(rows) :].any()


@pytest.mark.parametrize("longest", [30, 4096, 1 << 20])
@pytest.mark.parametrize(("pairs", "scale"), [(64, 1.0), (3, 1.19), (1, 1.0), (37, 0.5)])
def test_turns_are_those_of_the_angle(pairs: int, scale: float, longest: int) -> None:
    """Rotary cosines and sines are as exact as float32 allows, in the kernel and in the reference implementation."""
    positions = np.random.default_rng(pairs).integers(0, longest, 50).astype(np.int32)
    positions[:2] = 0, longest - 1
    inv_freq = (1.0 / 10000.0 ** (torch.arange(pairs) / pairs)).numpy()
    [(turns, wanted)] = both("rotary_turns", (positions, inv_freq, scale), np.empty((50, 2 * pairs), np.float32))
    angles = (positions.astype(np.float32)[:, None] * inv_freq).astype(np.float64)
    exact = np.concatenate((np.cos(angles), np.sin(angles)), axis=1) * np.float32(scale)
    assert np.abs(turns - exact).max() < 1.3e-7
    assert np.abs(wanted - exact).max() < 3e-7
