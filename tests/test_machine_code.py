"""Which changes of compiled kernels end `python -m benchmarks.machine_code` as faults."""

from __future__ import annotations

import json
import pathlib
import sys
from typing import Any

import pytest

from benchmarks import machine_code
from benchmarks.machine_code import FORM, faults, in_flight_bytes, instructions_per_kv_byte, last_lines, table

LINE: dict[str, Any] = {
    **dict.fromkeys(FORM, 0),
    "capability": 90,
    "kernel": "_piece_kernel",
    "variant": 1,
    "head_dim": 128,
    "item_bytes": 2,
    "kv_bytes": 32768,
    "warps": 4,
    "registers": 80,
    "stack_bytes": 16,
    "shared_bytes": 39168,
    "instructions": 1600,
    "loop_instructions": 410,
    "programs": 5,
    "warps_held": 20,
    "copies_in_flight_bytes": 5 * 39168,
    "widest_load_bytes": 16,
    "wgmma": 0,
    "mma": 32,
    "tcgen05": 0,
}
KERNEL = "_piece_kernel (1) for 90"


@pytest.mark.parametrize(
    ("changed", "fault"),
    [
        ({"stack_bytes": 24}, f"{KERNEL} spills: 24 bytes of stack, before 16"),
        ({"shared_bytes": 228 << 10}, f"{KERNEL} takes 233472 bytes of shared memory, more than there are"),
        ({"copies_in_flight_bytes": 4 * 39168}, f"{KERNEL} has 156672 bytes on their way, before 195840"),
        ({"widest_load_bytes": 8}, f"{KERNEL} loads 8 bytes at a time, before 16"),
        ({"loop_instructions": 430}, f"{KERNEL} has 0.0525 instructions for a byte of KV, before 0.05"),
        ({"kv_bytes": 16384}, f"{KERNEL} has 0.1001 instructions for a byte of KV, before 0.05"),
    ],
)
def test_a_kernel_that_became_worse_is_a_fault(changed: dict[str, int], fault: str) -> None:
    assert faults([LINE | changed], [LINE]) == [fault]


@pytest.mark.parametrize(
    "changed", [{}, {"loop_instructions": 414}, {"stack_bytes": 0, "loop_instructions": 300, "copies_in_flight_bytes": 6 * 39168}]
)
def test_what_is_as_good_as_before_is_none(changed: dict[str, int]) -> None:
    assert faults([LINE | changed], [LINE]) == []


def test_bytes_on_their_way_are_those_of_loads_where_nothing_is_copied() -> None:
    plain = LINE | {"copies_in_flight_bytes": 0, "kv_bytes": 0}
    assert (in_flight_bytes(plain), instructions_per_kv_byte(plain)) == (32 * 20 * 16, None)
    assert faults([plain | {"warps_held": 16}], [plain]) == [f"{KERNEL} has 8192 bytes on their way, before 10240"]


def test_another_form_and_an_older_result_are_not_compared() -> None:
    """What is new must keep nothing on the stack all the same."""
    worse = LINE | {"loop_instructions": 900, "widest_load_bytes": 4, "stack_bytes": 0}
    assert faults([worse | {"head_dim": 256}], [LINE]) == []
    assert faults([worse | {"head_dim": 256, "stack_bytes": 8}], [LINE]) == [f"{KERNEL} spills: 8 bytes of stack, before 0"]
    older = {key: value for key, value in LINE.items() if key != "kv_bytes"}
    assert faults([LINE | {"loop_instructions": 900}], [older]) == []
    assert "0.05" in table([LINE]).splitlines()[1].split()


def test_a_run_with_a_fault_ends_so(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    before = tmp_path / "before.jsonl"
    monkeypatch.setattr(sys, "argv", ["machine_code", "--capability", "90", "--against", str(before), "--out", str(before)])
    before.write_text("")
    for widest, code in ((16, 0), (8, 1), (8, 0)):
        line = LINE | {"stack_bytes": 0, "widest_load_bytes": widest}
        monkeypatch.setattr(machine_code, "measured", lambda _, line=line: [line])
        assert machine_code.main() == code


def test_each_capability_is_compared_with_the_last_result_that_has_it(tmp_path: pathlib.Path) -> None:
    old, new = tmp_path / "1.jsonl", tmp_path / "2.jsonl"
    old.write_text("".join(json.dumps({"capability": one, "run": 1}) + "\n" for one in (80, 90)))
    new.write_text(json.dumps({"capability": 90, "run": 2}) + "\n")
    assert last_lines([new, old], [80, 90, 100]) == {
        "2.jsonl": [{"capability": 90, "run": 2}],
        "1.jsonl": [{"capability": 80, "run": 1}],
    }


def test_the_bytes_of_an_iteration_are_those_of_its_positions() -> None:
    pytest.importorskip("triton")
    from tests.engine.kernels.compile_for_hopper import kv_bytes

    heads, latents = {"N": 64, "D": 128}, {"N": 32, "L": 512, "E": 64}
    assert kv_bytes("_piece_kernel", heads | {"FP8": False}, 2) == 64 * 2 * 128 * 2
    assert kv_bytes("_extend_kernel", heads | {"FP8": True}, 2) == 64 * 2 * (128 + 1)
    assert kv_bytes("_latent_piece_kernel", latents | {"FP8": False}, 2) == 32 * 576 * 2
    assert kv_bytes("_grouped_kernel", heads, 2) == 0
