"""Probes of an engine with a model that computes, also while its first step waits for weights."""

from __future__ import annotations

import pytest

from engine.memory.chunk_memory import DeviceUnusable
from engine.protocol import LoadDone, LoadFailed, LoadStreams, Probe, Probed, read_journal
from loader.reading.range_plan import Read
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


@pytest.mark.parametrize("error", [RuntimeError("CUDA error: an illegal memory access was encountered"), DeviceUnusable("lost")])
def test_a_load_that_fails_with_its_device_ends_the_engine(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, error: RuntimeError
) -> None:
    """A device's errors outlast the call that meets them: each later load of this process would fail, of whatever model."""

    def fails(read: Read) -> None:
        raise error

    def probe(number: int) -> None:
        raise RuntimeError("the device is gone")

    bench.spoil = fails
    monkeypatch.setattr(bench.engine, "_probe", probe)
    bench.load()
    with pytest.raises(RuntimeError, match="lost" if isinstance(error, DeviceUnusable) else "the device is gone"):
        bench.until(LoadFailed)
    assert read_journal(bench.journal) == ()


@pytest.mark.parametrize(
    ("error", "is_checked"),
    [
        (RuntimeError("cuMemMap: CUDA_ERROR_INVALID_VALUE"), True),
        (RuntimeError("CUDA out of memory. Tried to allocate 2.00 MiB."), False),
        (MemoryError("cuMemMap: CUDA_ERROR_OUT_OF_MEMORY"), False),
    ],
)
def test_a_load_that_fails_on_a_device_that_computes_fails_alone(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, error: Exception, is_checked: bool
) -> None:
    """A check takes memory of the device, so that none is made where memory is what the load has lacked."""
    checked: list[int] = []

    def fails(read: Read) -> None:
        raise error

    bench.spoil = fails
    monkeypatch.setattr(bench.engine, "_probe", checked.append)
    bench.load()
    assert str(error) in bench.until(LoadFailed).error
    assert bool(checked) == is_checked
    bench.spoil = lambda read: None
    bench.load()
    bench.until(LoadDone)
