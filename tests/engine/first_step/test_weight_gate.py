"""Tests of the gate between weights that arrive and the step that needs them."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from engine.memory.weight_gate import WeightGate, WeightsWithdrawn
from loader.models.catalog import scan_one
from loader.sizes.layout import WeightSlot, weight_layout

LAYOUT = (
    WeightSlot("embed", (4,), 0, 8),
    WeightSlot("layers.0.a", (4,), 64, 8, stage=1),
    WeightSlot("layers.0.b", (2, 4), 72, 8, scales_at_bytes=128, stage=1),
    WeightSlot("layers.1.a", (4,), 192, 8, stage=2),
    WeightSlot("norm", (4,), 256, 8, stage=3),
)


def test_a_stage_opens_with_its_last_byte() -> None:
    gate = WeightGate(LAYOUT)
    computed: list[str] = []
    thread = threading.Thread(target=lambda: computed.extend(gate.behind(iter(["first", "second"]))))
    gate.landed(192, 300)
    gate.landed(0, 77)
    thread.start()
    gate.landed(77, 132)  # without the second scale
    assert computed == []
    with gate.step():
        gate.wait(0)
        gate.wait(2)
    gate.landed(132, 192)
    thread.join(0.2)
    assert thread.is_alive()  # everything has arrived, but is not yet known to be good
    gate.open()
    thread.join(60)
    assert computed == ["first", "second"]
    assert gate.waited_s > 0.1


def test_it_is_told_once_that_the_first_weights_are_there() -> None:
    told: list[int] = []
    gate = WeightGate(LAYOUT)
    gate.begun = lambda: told.append(1)
    gate.landed(64, 300)
    gate.landed(0, 7)
    assert told == []
    gate.landed(7, 8)
    assert told == [1]
    gate.begin_anew()
    gate.landed(0, 300)
    assert told == [1]


def test_withdrawing_waits_for_the_step() -> None:
    gate = WeightGate(LAYOUT)
    inside, left = threading.Event(), threading.Event()
    errors: list[str] = []

    def step() -> None:
        try:
            with gate.step():
                inside.set()
                gate.wait(1)
        except WeightsWithdrawn as error:
            errors.append(str(error))
        left.set()

    threading.Thread(target=step).start()
    assert inside.wait(60)
    gate.withdraw("a bad sector")
    assert left.wait(60)
    assert errors == ["a bad sector"]
    with pytest.raises(WeightsWithdrawn), gate.step():
        raise AssertionError("begun on weights that are withdrawn")


def test_beginning_anew_counts_from_nothing() -> None:
    gate = WeightGate(LAYOUT)
    gate.landed(0, 300)
    gate.begin_anew()
    with gate.step():
        thread = threading.Thread(target=lambda: gate.wait(0))
        thread.start()
        thread.join(0.1)
        assert thread.is_alive()
        gate.landed(0, 8)
        thread.join(60)
        assert not thread.is_alive()


def test_the_layout_of_a_model_has_a_stage_for_each_layer(saved: Path) -> None:
    shape = scan_one(saved).shape
    assert shape is not None
    assert len(WeightGate(weight_layout(shape, "float32"))._arrivals.left_bytes) == shape.num_layers + 2
