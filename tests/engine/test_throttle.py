"""Tests of the limits that make a disk and copies slow on purpose."""

from __future__ import annotations

import pytest

from engine.lifecycle import throttle


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert 0 < seconds <= 0.02, "a load that is withdrawn must not wait long"
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(throttle, "time", clock)
    return clock


def test_bytes_take_as_long_as_they_should(clock: Clock) -> None:
    throttle.hold(99.5, 2000, 1000, lambda: False)
    assert clock.now == pytest.approx(101.5)
    throttle.hold(90.0, 2000, 1000, lambda: False)
    assert clock.now == pytest.approx(101.5), "it has been slower than that anyway"
    throttle.hold(101.5, 10**12, 0, lambda: False)
    assert clock.now == pytest.approx(101.5)


def test_a_cancelled_load_does_not_wait(clock: Clock) -> None:
    throttle.hold(100.0, 10**12, 1, lambda: clock.now > 100.1)
    assert clock.now == pytest.approx(100.12, abs=0.021)
