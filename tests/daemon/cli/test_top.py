"""How `hearth top` draws, from a snapshot."""

from __future__ import annotations

import re
from typing import Any

import pytest

from daemon.cli.top import lines

MIB = 1 << 20


def snapshot(time: float = 1000.0, tokens: int = 0) -> dict[str, Any]:
    parts = [("work", "", 10), ("weights", "a", 40), ("kv", "a", 5), ("cache", "a", 5), ("weights", "org/b", 20), ("free", "", 20)]
    model = {"state": "ready", "weights_bytes": 40 * MIB, "kv_bytes": 5 * MIB, "active": 2, "queued": 0}
    swap = {
        "model": "a",
        "device": "cpu:0",
        "begun": time - 30,
        "load_s": 0.5,
        "source": "disk",
        "outcome": "ready",
        "forced": False,
    }
    return {
        "time": time,
        "node": {"ready": True, "draining": False, "reason": ""},
        "counters": {"requests": 3, "tokens": tokens, "open": 2, "queued": 1},
        "devices": [
            {
                "name": "cpu:0",
                "up": True,
                "budget_bytes": 100 * MIB,
                "loading": "",
                "problem": "",
                "waiting": 1,
                "parts": [{"kind": kind, "model": name, "bytes": mib * MIB} for kind, name, mib in parts],
            }
        ],
        "models": [
            {"name": "a", **model},
            {"name": "c" * 60, **model},
            {"name": "cold", **model, "state": "cold"},
            {"name": "org/b", **model},
        ],
        "host_tier": {"bytes": 0},
        "tokens": {"a": tokens},
        "swaps": [{**swap, "victims": []}, {**swap, "forced": True, "victims": [{"name": "org/b"}], "begun": time - 1}],
    }


def test_host_memory_is_told_where_there_is_some() -> None:
    assert not any("host memory" in line for line in lines(snapshot(), snapshot(), 80, False))
    tier = {"bytes": 64 * MIB, "weights_bytes": 40 * MIB, "kv_bytes": 4 * MIB, "transit_bytes": 0, "free_bytes": 20 * MIB}
    shown = lines({**snapshot(), "host_tier": tier}, snapshot(), 120, False)
    assert "host memory 64.0 MiB: weights 40.0 MiB, saved KV 4.0 MiB, being written 0 B, free 20.0 MiB" in shown


def test_bars_add_up() -> None:
    shown = lines(snapshot(1002.0, 300), snapshot(), 102, False)
    assert shown[0] == "hearthd ready | 2 open, 1 waiting | 0.0 ended/s | 150 tok/s"
    assert shown[2] == "cpu:0  100.0 MiB, 20.0 MiB free, 1 models wait"
    assert shown[3] == "[" + "#" * 10 + "A" * 40 + "=" * 5 + "-" * 5 + "D" * 20 + " " * 20 + "]"
    assert [line.split()[0] for line in shown[7:10]] == ["A", "B", "D"]
    assert shown[7].endswith("150")
    assert "cold" not in "\n".join(shown)
    assert shown[-1] == "     -1 s  a on cpu:0: 0.50 s from disk; org/b left"


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_no_line_is_too_long(columns: int) -> None:
    for colours in (False, True):
        for line in lines(snapshot(), snapshot(), columns, colours):
            assert len(re.sub(r"\x1b\[[0-9;]*m", "", line)) <= columns


def test_timeline() -> None:
    (line,) = [line for line in lines(snapshot(), snapshot(), 111, False) if line.startswith("swaps of")]
    cells = line[line.index("[") + 1 : line.index("]")]
    assert cells[-1] == "f"
    assert cells.index("l") == int(len(cells) * 0.75)


def with_drafts(time: float, drafted: int, accepted: int) -> dict[str, Any]:
    made = snapshot(time)
    made["models"][0] |= {"drafted_tokens": drafted, "accepted_tokens": accepted}
    return made


def test_acceptance_is_that_of_the_last_interval() -> None:
    shown = lines(with_drafts(1002.0, 1100, 570), with_drafts(1000.0, 1000, 500), 120, False)
    (header,) = [line for line in shown if "TOK/S" in line]
    assert header.endswith("ACCEPTED")
    (row,) = [line for line in shown if line.startswith("A ")]
    assert row.endswith(" 70 %")
    for now, before in (
        (with_drafts(1002.0, 1000, 500), with_drafts(1000.0, 1000, 500)),
        (snapshot(), snapshot()),
    ):
        assert not [line for line in lines(now, before, 120, False) if "ACCEPTED" in line or "%" in line]
    (row,) = [line for line in lines(with_drafts(1002.0, 10, 5), snapshot(), 120, False) if line.startswith("A ")]
    assert row.endswith(" 50 %"), "all of them are new"


def test_adapters_in_memory_are_told_with_their_base() -> None:
    made = snapshot()
    made["models"][0] |= {"num_adapters": 3, "adapters": {"me/red": MIB, "blue": MIB}}
    made["models"][1] |= {"num_adapters": 2, "adapters": {}}
    assert "adapters of a: 2 of 3 in memory, 2.0 MiB: blue, me/red" in lines(made, made, 120, False)
    assert len([line for line in lines(made, made, 120, False) if "adapters of" in line]) == 1
    assert not any("adapters" in line for line in lines(snapshot(), snapshot(), 120, False))


def split_snapshot(time: float, tokens: int) -> dict[str, Any]:
    """`pair` has a share on each of two devices, beside `whole` on the first one."""
    made = snapshot(time)
    share = [("weights", "pair", 30), ("kv", "pair", 10)]
    made["devices"] = [
        {
            **made["devices"][0],
            "name": name,
            "waiting": 0,
            "parts": [
                *({"kind": kind, "model": model, "bytes": mib * MIB} for kind, model, mib in parts),
                {"kind": "free", "model": "", "bytes": (100 - sum(mib for _, _, mib in parts)) * MIB},
            ],
        }
        for name, parts in (("cpu:0", [*share, ("weights", "whole", 20)]), ("cpu:1", share))
    ]
    both = {"state": "ready", "weights_bytes": 60 * MIB, "kv_bytes": 20 * MIB, "active": 1, "queued": 0, "device": "cpu:0+cpu:1"}
    made["models"] = [
        {"name": "pair", **both},
        {"name": "whole", **both, "weights_bytes": 20 * MIB, "kv_bytes": 0, "device": "cpu:0"},
    ]
    made["tokens"] = {"pair": tokens}
    made["swaps"] = [{**made["swaps"][0], "model": "pair", "device": "cpu:0+cpu:1"}]
    return made


def test_a_split_model_is_in_the_bar_of_each_of_its_devices_and_has_one_row() -> None:
    shown = lines(split_snapshot(1002.0, 40), split_snapshot(1000.0, 0), 102, False)
    assert shown[2:6] == [
        "cpu:0  100.0 MiB, 40.0 MiB free",
        "[" + "A" * 30 + "=" * 10 + "B" * 20 + " " * 40 + "]",
        "cpu:1  100.0 MiB, 60.0 MiB free",
        "[" + "A" * 30 + "=" * 10 + " " * 60 + "]",
    ]
    (row,) = [line for line in shown if line.startswith("A ")]
    assert row.split() == ["A", "pair", "ready", "60.0", "MiB", "20.0", "MiB", "1", "0", "20"]
    assert shown[-1] == "    -30 s  pair on cpu:0+cpu:1: 0.50 s from disk"
