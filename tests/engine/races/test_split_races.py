"""Nothing races in random schedules of an engine with shares of split models, and faults of exchanges are found."""

from __future__ import annotations

from collections import Counter

import pytest

pytest.importorskip("triton")

from tests.engine.races.device import TORCH
from tests.engine.races.engine_run import run_of
from tests.engine.races.split_run import SplitRun

NUM_SEEDS = 14  # of each version of torch


@pytest.mark.parametrize("version", TORCH)
def test_nothing_races_beside_exchanges(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    counts, others = Counter[str](), Counter[str]()
    for seed in range(NUM_SEEDS):
        run = run_of(seed, version, monkeypatch, kind=SplitRun)
        assert run.faults == [], f"seed {seed}"
        counts.update(run.device.counts)
        others.update(run.other.device.counts)
    exchanges = ("a sum of ranks", "sum", "broadcast", "gather")
    for what in (*exchanges, "norm", "replayed a sum of ranks", "replayed broadcast", "replayed gather", "unmapping"):
        assert counts[what] > 5, what
    for what in (*exchanges, "norm"):
        assert others[what] > 5, what
