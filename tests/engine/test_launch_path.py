"""The host code of a GPU's steps runs against a driver that does nothing, and its benchmark tells eager from replayed steps."""

from __future__ import annotations

import json
import shutil
from typing import Any

import pytest

pytest.importorskip("triton")

from tests.engine.not_interpreted import output_of

LAYERS = 2  # of the benchmark's tiny model


pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="the driver that does nothing is compiled with cc")


def lines_of(*options: str) -> list[dict[str, Any]]:
    """Returns what the benchmark tells of the tiny model."""
    sizes = ["--models", "tiny", "--steps", "20", "--rows", "6", "--chunk", "9"]
    told = output_of("benchmarks.launch_path", *sizes, *options)
    return [json.loads(line) for line in told.splitlines() if line.startswith("{")]


def test_eager_steps_launch_each_kernel_and_replayed_ones_none() -> None:
    told = {(line["step"], line["graph"]): line for line in lines_of()}
    for kind in ("decode", "mixed"):
        # two norms, rotary embedding, attention and a gate a layer
        assert told[kind, False]["launches"] > 5 * LAYERS
        assert told[kind, False]["us"] > 0
        assert told[kind, True]["launches"] < 1, "only changes of block tables are launched beside a graph"
        for settings in ("penalties", "log-probabilities", "bias", "min_tokens", "grammar", "all of these"):
            assert told[f"{kind}, {settings}", True]["launches"] < 1, "rows with these are sampled by a graph, too"


def test_so_do_the_first_and_the_last_stage_of_a_pipeline() -> None:
    lines = lines_of("--stages", "2")
    assert len(lines) == 8
    for line in lines:
        if line["graph"]:
            assert line["launches"] < 1
        else:
            assert line["launches"] > 5 * LAYERS // 2
