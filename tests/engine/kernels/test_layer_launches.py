"""A layer of a dense Llama launches ten kernels in a step that decodes, and nine where decode attention joins its own pieces."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest

pytest.importorskip("triton")

ROOT = pathlib.Path(__file__).parents[3]


def test_a_layer_launches_no_more_than_docs_gpu_says() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.engine.kernels.layer_launches"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    two_kernels, joining = map(json.loads, done.stdout.splitlines())
    ours = {"_norm_kernel": 2, "_rope_and_store_kernel": 1, "_piece_kernel": 1, "_gate_kernel": 1}
    assert joining == ours | {"product": 4}
    assert two_kernels == joining | {"_combine_kernel": 1}
    assert (sum(two_kernels.values()), sum(joining.values())) == (10, 9)
