"""What Triton compiles for a model's steps is compiled by its warm-up: no step waits for a compiler, and none of its neighbours.
`python -m tests.engine.kernels.record_keys --every` tries more models and every number of rows.
"""

from __future__ import annotations

import json

import pytest

pytest.importorskip("triton")

from tests.engine.kernels.key_cases import COVERING
from tests.engine.not_interpreted import output_of


def test_no_step_needs_a_kernel_that_the_warm_up_did_not_launch() -> None:
    lines = output_of("tests.engine.kernels.record_keys").splitlines()
    told = {line["model"]: line for line in map(json.loads, lines)}
    assert told.keys() == {"values", "loads", "joining", *COVERING}
    assert {name: line["added"] for name, line in told.items() if line["added"]} == {}
    assert told.pop("loads")["warmed"] == 3  # checksums, and the decoder, aligned to 16 bytes or not
    assert told.pop("values")["warmed"] > 20
    assert all(line["warmed"] >= 20 and line["steps"] > 20 for line in told.values())
