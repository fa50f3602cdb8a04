"""The table of aims: which values of which lines, and which of them miss."""

from __future__ import annotations

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


def test_the_table_has_a_column_a_machine() -> None:
    head, rule, *rows = table([LINES, LINES]).splitlines()
    assert head == "|  | aim | one, today | one, today |"
    assert len(rows) == len(AIMS)
    assert {row.count("|") for row in [head, rule, *rows]} == {5}
