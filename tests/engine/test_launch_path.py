"""The host code of a GPU's steps runs against a driver that does nothing, and its benchmark tells eager from replayed steps."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

pytest.importorskip("triton")

ROOT = pathlib.Path(__file__).parents[2]
LAYERS = 2  # of the benchmark's tiny model


@pytest.mark.skipif(shutil.which("cc") is None, reason="the driver that does nothing is compiled with cc")
def test_eager_steps_launch_each_kernel_and_replayed_ones_none() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "benchmarks.launch_path", "--models", "tiny", "--steps", "20", "--rows", "6", "--chunk", "9"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    told = {(line["step"], line["graph"]): line for line in lines}
    for kind in ("decode", "mixed"):
        # two norms, rotary embedding, attention and a gate a layer
        assert told[kind, False]["launches"] > 5 * LAYERS
        assert told[kind, False]["us"] > 0
        assert told[kind, True]["launches"] < 1, "only changes of block tables are launched beside a graph"
        for settings in ("penalties", "log-probabilities", "bias", "min_tokens", "grammar", "all of these"):
            assert told[f"{kind}, {settings}", True]["launches"] < 1, "rows with these are sampled by a graph, too"
