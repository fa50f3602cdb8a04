"""The table of aims: which values of which lines, and which of them miss."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import aims
from benchmarks.aims import AIMS, Aim, table

LINES = [
    {"machine": "one", "date": "today"},
    {"benchmark": "cpu", "model": "mid", "streams": 1, "ratio": 0.7},
    {"benchmark": "cpu", "model": "mid", "streams": 8, "ratio": 1.2},
    {"benchmark": "cpu", "model": "mid", "streams": 9, "ratio": 0.1},
    {"benchmark": "cpu", "model": "one-b", "streams": 1, "ratio": 0.1},
    {"benchmark": "cpu", "model": "mid", "streams": 1},
]


def test_values_that_miss_their_bound_are_marked() -> None:
    aim = Aim("", "cpu", "ratio", {"model": "mid", "streams": (1, 8), "ratio": (0.7, 1.2)}, least=(0.8, 1.1))
    assert (aim.aim(), aim.of(LINES)) == ("≥ 0.8 / 1.1", "0.7 ✗ / 1.2")
    both = Aim("", "cpu", "ratio", {"model": "mid", "streams": (1, 8), "ratio": (0.7, 1.2)}, least=(0.7,), most=(1.0,))
    assert (both.aim(), both.of(LINES)) == ("≥ 0.7, ≤ 1", "0.7 / 1.2 ✗")


def test_what_was_not_measured_is_said() -> None:
    assert Aim("", "latency", "ratio", {}, most=(0,)).of(LINES) == "-"


def test_a_value_may_say_what_it_was_measured_with() -> None:
    aim = Aim("", "cpu", "ratio", {"streams": 8}, most=(0,), beside=("streams", "streams"))
    assert (aim.aim(), aim.of(LINES)) == ("0", "1.2 (8 streams) ✗")


def test_aims_of_split_models_are_held_to_the_newest_file_that_has_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aims, "RESULTS", tmp_path)
    asleep, spinning = (
        {"way": "shared memory", "state": state, "us_p50": us} for state, us in (("from sleep", 50), ("spinning", 5))
    )
    files = {
        "2026-01-01-ranks": {"sums": [asleep | {"us_p50": 60}], "plans": [{"state": "spinning", "us_p50": 9.5}]},
        "2026-01-02-ranks": {"sums": [spinning, asleep], "load": [1.0]},
        "2026-01-03-ranks-mixture": {"decode": []},
    }
    for name, parts in files.items():
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"benchmark": "ranks"} | parts))
    _, _, *rows = [[cell.strip() for cell in line.split("|")[3:5]] for line in aims.split_table().splitlines()]
    assert rows[:2] == [["50 ✗", "`2026-01-02-ranks.jsonl`"], ["9.5", "`2026-01-01-ranks.jsonl`"]]
    assert rows[2:] == [["-", "`-`"]] * (len(aims.SPLIT_AIMS) - 2)


def test_the_table_has_a_column_a_machine() -> None:
    head, rule, *rows = table([LINES, LINES]).splitlines()
    assert head == "|  | aim | one, today | one, today |"
    assert len(rows) == len(AIMS)
    assert {row.count("|") for row in [head, rule, *rows]} == {5}
