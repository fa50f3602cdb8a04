"""Probes of an engine with a model that computes, also while its first step waits for weights."""

from __future__ import annotations

import pytest

from engine.protocol import LoadDone, LoadStreams, Probe, Probed, read_journal
from tests.engine.first_step.bench import Bench


def test_a_probe_does_not_wait_for_a_first_step(bench: Bench, wanted: list[int]) -> None:
    bench.allow(1)
    bench.load()
    bench.until(LoadStreams)
    bench.submit(7)
    bench.until_waits_for(2)
    bench.engine._handle(Probe(3))
    assert bench.channel.sent[-1] == Probed(3)
    assert read_journal(bench.journal) == (7,)
    bench.allow(99)
    assert bench.until_answered(7) == [wanted]


def test_a_probe_that_fails_blames_no_request_of_the_step_before(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The journal has that step's requests until the loop is idle, but the step has ended well."""
    bench.load()
    bench.until(LoadDone)
    bench.submit(7)
    bench.pump(lambda: bench.tokens(7))
    assert read_journal(bench.journal) == (7,)

    def fails(number: int) -> None:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(bench.engine, "_probe", fails)
    with pytest.raises(RuntimeError, match="the device is gone"):
        bench.engine._handle(Probe(1))
    assert read_journal(bench.journal) == ()
