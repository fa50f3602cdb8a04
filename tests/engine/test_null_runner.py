"""The null runner's tokens can be computed in advance, and its steps take the time that was asked for."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.contracts.loads import LoadCancelled, LoadTask
from engine.null.runner import NullLoadError, NullRunner, Pacer, null_candidates, null_tokens
from tests.engine.engine_process import load_message, null_checkpoint, null_configure


def task(path: str, progress: Any = lambda *_: None, cancelled: bool = False) -> LoadTask:
    return LoadTask(load_message(path), np.arange(4, dtype=np.int32), progress, lambda: cancelled)


def test_tokens_follow_from_seed_and_position() -> None:
    candidates = null_candidates(1000, [300, 301])
    seeds, positions = np.arange(50, dtype=np.uint64), np.arange(50, dtype=np.int32)
    ids = null_tokens(seeds, positions, candidates)
    assert (ids == null_tokens(seeds, positions, candidates)).all()
    one = null_tokens(seeds[7:8], positions[7:8], candidates)
    assert ids[7] == one[0], "alone and in a batch the same"
    assert len(np.unique(ids)) > 30
    assert not np.isin(ids, [300, 301]).any()
    assert ids.max() < 1000


def test_candidates_never_hold_an_end_id() -> None:
    for vocab_size in (4, 100, 511, 512, 128_000):
        ids = null_candidates(vocab_size, [vocab_size - 1])
        assert len(ids)
        assert ids.max() < vocab_size - 1 or ids.max() < vocab_size
        assert vocab_size - 1 not in ids
    with pytest.raises(ValueError, match="vocab_size 2"):
        null_candidates(2, [0, 1])


def test_shape_comes_from_the_config(tmp_path: Path) -> None:
    model = NullRunner(null_configure()).load(task(null_checkpoint(tmp_path)))
    (group,) = model.kv_groups
    assert group.block_bytes == 2 * 2 * 2 * 16 * 4 * 16  # keys and values, layers, heads, head size, float32, tokens
    assert group.layers == (0, 1)
    assert model.vocab_size == 1000
    assert model.weights_bytes == 4 << 16


def test_steps_are_paced_on_average() -> None:
    pacer = Pacer(0.002)
    pacer.wait()
    started = time.monotonic()
    for _ in range(50):
        pacer.wait()
    assert time.monotonic() - started >= 50 * 0.002 - 0.002, "sleeping too long is made up for, stepping too soon never happens"


def test_a_step_of_more_tokens_may_take_longer() -> None:
    pacer = Pacer(0.001)
    pacer.wait()
    started = time.monotonic()
    for _ in range(10):
        pacer.wait(0.004)
    assert time.monotonic() - started >= 10 * 0.005 - 0.005


def test_load_reports_progress_and_can_be_cancelled(tmp_path: Path) -> None:
    path = null_checkpoint(tmp_path, load_s=0.3)
    told: list[tuple[int, int]] = []
    NullRunner(null_configure()).load(task(path, lambda done, total: told.append((done, total))))
    assert told[-1] == (4 << 16, 4 << 16)
    assert len(told) > 2
    with pytest.raises(LoadCancelled):
        NullRunner(null_configure()).load(task(path, cancelled=True))


def test_load_errors_name_the_file(tmp_path: Path) -> None:
    runner = NullRunner(null_configure())
    with pytest.raises(NullLoadError, match=r"config\.json"):
        runner.load(task(str(tmp_path)))
    path = null_checkpoint(tmp_path, load_error="shape is wrong", load_error_permanent=False)
    with pytest.raises(NullLoadError, match="shape is wrong") as caught:
        runner.load(task(path))
    assert caught.value.permanent is False
