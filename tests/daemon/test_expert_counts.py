"""What engines tell of experts is added up by model, layer and device, and how even it is follows from that."""

from __future__ import annotations

import argparse
import json
from array import array
from typing import Any

import pytest

from daemon.cli.experts import experts
from daemon.metrics.counters import Metrics
from daemon.metrics.expert_counts import ExpertCounts, imbalance
from daemon.metrics.page import Now, render
from engine.protocol import ExpertTokens


def told(layers: list[int], counts: list[int], first: int = 0, num_experts: int = 4, model: str = "m") -> ExpertTokens:
    return ExpertTokens(model, layers, num_experts, first, array("q", counts).tobytes())


def counts_of(counts: ExpertCounts, *names: str) -> dict[int, list[int]]:
    return {row["layer"]: row["counts"] for row in counts.report(names)["layers"]}


def test_what_devices_tell_is_added_up() -> None:
    """Also of a split model, whose devices have other experts and other layers."""
    counts = ExpertCounts()
    counts.add("cpu:0", told([1, 2], [1, 2, 3, 4], num_experts=4))
    counts.add("cpu:1", told([1, 2], [10, 20, 30, 40], first=2))
    counts.add("cpu:0", told([1, 2], [0, 1, 0, 0]))
    counts.add("cpu:2", told([5], [7, 0, 0, 0]))
    assert counts_of(counts, "m") == {1: [1, 3, 10, 20], 2: [3, 4, 30, 40], 5: [7, 0, 0, 0]}
    assert counts.of_device == {("m", "cpu:0"): 11, ("m", "cpu:1"): 100, ("m", "cpu:2"): 7}
    assert counts.report(["m"])["devices"] == {"cpu:0": 11, "cpu:1": 100, "cpu:2": 7}
    assert counts.report(["m"])["tokens"] == 118


def test_devices_are_told_in_the_order_of_their_numbers() -> None:
    counts = ExpertCounts()
    for device in ("cuda:10", "cuda:2"):
        counts.add(device, told([0], [1, 2, 3, 4]))
    assert list(counts.report(["m"])["devices"]) == ["cuda:2", "cuda:10"]


def test_replicas_are_added_up() -> None:
    counts = ExpertCounts()
    counts.add("cpu:0", told([0], [1, 2, 3, 4]))
    counts.add("cpu:1", told([0], [10, 0, 0, 0], model="m@2"))
    counts.add("cpu:1", told([0], [9, 9, 9, 9], model="other"))
    assert counts_of(counts, "m", "m@2") == {0: [11, 2, 3, 4]}
    assert counts_of(counts, "m") == {0: [1, 2, 3, 4]}
    assert counts.report(["m", "m@2"])["devices"] == {"cpu:0": 10, "cpu:1": 10}


def test_other_files_with_other_experts_begin_anew() -> None:
    counts = ExpertCounts()
    counts.add("cpu:0", told([0, 1], [1, 2, 3, 4, 5, 6, 7, 8]))
    counts.add("cpu:0", told([0], [5, 6], num_experts=2))
    assert counts_of(counts, "m") == {0: [5, 6]}
    assert counts.of_device["m", "cpu:0"] == 36 + 11, "a counter never falls"


@pytest.mark.parametrize(
    ("layers", "wanted"),
    [
        ([], 1.0),
        ([[0, 0]], 1.0),
        ([[5, 5, 5, 5]], 1.0),
        ([[8, 0, 0, 0]], 4.0),
        ([[6, 2], [1, 7]], 1.625),  # (6 + 7) / (4 + 4): other experts are busy in other layers, which does not make it even
    ],
)
def test_imbalance(layers: list[list[int]], wanted: float) -> None:
    assert imbalance([array("q", counts) for counts in layers]) == wanted


def test_a_layer_says_who_is_busiest_and_who_was_never_chosen() -> None:
    counts = ExpertCounts()
    counts.add("cpu:0", told([3], [0, 6, 2, 0]))
    (row,) = counts.report(["m"])["layers"]
    assert row == {
        "layer": 3,
        "tokens": 8,
        "busiest": 1,
        "busiest_tokens": 6,
        "imbalance": 3.0,
        "num_unused": 2,
        "counts": [0, 6, 2, 0],
    }
    assert counts.report(["nobody"]) == {"tokens": 0, "imbalance": 1.0, "layers": [], "devices": {}}


def test_metrics_have_no_series_for_each_expert() -> None:
    metrics = Metrics()
    metrics.experts.add("cpu:0", told([0, 1], [3, 1, 3, 1], num_experts=4))
    metrics.experts.add("cpu:1", told([0, 1], [0, 0, 0, 0], first=2))
    lines = render(metrics, Now("1", {})).decode().splitlines()
    assert [line for line in lines if line.startswith("hearth_expert_")] == [
        'hearth_expert_tokens_total{device="cpu:0",model="m"} 8.0',
        'hearth_expert_tokens_total{device="cpu:1",model="m"} 0.0',
        'hearth_expert_imbalance{model="m"} 3.0',
    ]


def shown(counts: ExpertCounts, capsys: pytest.CaptureFixture[str], as_json: bool = False) -> str:
    """Returns what `hearth experts m` prints."""

    class Answers:
        def get(self, path: str) -> Any:
            assert path == "/control/v1/experts/m"
            return {"model": "m", "num_experts": 4, **counts.report(["m"])}

    experts(Answers(), argparse.Namespace(name="m", json=as_json))  # type: ignore[arg-type]
    return capsys.readouterr().out


def test_the_command_shows_layers_and_devices(capsys: pytest.CaptureFixture[str]) -> None:
    counts = ExpertCounts()
    assert shown(counts, capsys) == "no token has passed through the experts of m since hearthd started\n"
    counts.add("cpu:0", told([0, 2], [600, 200, 0, 1], num_experts=4))
    one_device = shown(counts, capsys)
    assert "DEVICE" not in one_device
    counts.add("cpu:1", told([0, 2], [0, 0, 99, 100], first=2))
    assert shown(counts, capsys).splitlines() == [
        "LAYER  TOKENS  BUSIEST  ITS SHARE  IMBALANCE  NEVER CHOSEN",
        "    0     800        0     75.0 %       3.00        2 of 4",
        "    2     200        3     50.0 %       2.00        1 of 4",
        "",
        "1000 tokens at experts in 2 layers; the busiest have 2.80 times as many as the mean",
        "",
        "DEVICE  TOKENS   SHARE",
        "cpu:0      801  80.1 %",
        "cpu:1      199  19.9 %",
    ]
    assert json.loads(shown(counts, capsys, as_json=True))["layers"][1]["counts"] == [0, 1, 99, 100]
