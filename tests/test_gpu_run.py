"""`make gpu` ends in time and keeps what it has, whatever its parts do."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from benchmarks.gpu import KILL_LIMIT_S, LIMIT_S, PARTS, Part, Report, run_part, seconds_for

LINE = json.dumps({"benchmark": "told", "value": 7})
CALL_LIMIT_S = 600  # of a command on the machine that runs it


def part(code: str, limit_s: float = 60) -> Part:
    return Part("part", ("timeit", "-n", "1", "-r", "1", code), limit_s)


def ends(report: Report) -> list[str]:
    return [line["ended"] for line in report.lines if line["benchmark"] == "gpu_parts"]


def test_parts_that_hang_cost_no_other_its_time() -> None:
    assert sum(one.limit_s for one in PARTS) + KILL_LIMIT_S <= LIMIT_S <= 540 < CALL_LIMIT_S
    for seed in range(100):
        hang, left_s, began = random.Random(seed), LIMIT_S - KILL_LIMIT_S, 0
        for number, one in enumerate(PARTS):
            limit_s = seconds_for(PARTS[number:], left_s)
            assert limit_s >= one.limit_s
            left_s -= limit_s if hang.random() < 0.5 else hang.random() * one.limit_s
            began += 1
        assert began == len(PARTS)
        assert left_s >= 0
    assert seconds_for(PARTS, 20.0) == 20.0


def test_a_part_that_hangs_is_ended_and_its_lines_are_kept(tmp_path: Path) -> None:
    report = Report(tmp_path)
    code = f"print({LINE!r}); import subprocess, time; subprocess.Popen(['sleep', '60']); time.sleep(60)"
    assert not run_part(part(code, 2.0), report, 2.0, tiny=False)
    assert ends(report) == ["out of time"]
    kept = [json.loads(text) for text in (tmp_path / "gpu.jsonl").read_text().splitlines()]
    assert kept[0] == json.loads(LINE)
    assert "told" in (tmp_path / "gpu.md").read_text()


def test_parts_end_well_or_say_how(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = Report(tmp_path)
    assert run_part(part(f"print({LINE!r})"), report, 60, tiny=False)
    assert not run_part(part("raise ValueError('no such device')"), report, 60, tiny=False)
    assert ends(report) == ["well", "exit 1"]
    assert "no such device" in capsys.readouterr().out
