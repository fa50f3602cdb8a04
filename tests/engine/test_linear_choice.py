"""The kernel for few rows is chosen by times that contain no launch and no disturbance, and choosing leaves other threads alone."""

from __future__ import annotations

import itertools
import json
import threading
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from engine.cuda.kernels import linear_choice
from engine.cuda.kernels.linear_choice import (
    HEAD_START,
    HEAD_START_TRIES,
    MEASURE_TRIES,
    REPEATS,
    apart,
    is_open,
    measure,
    weights_of_products,
)

WEIGHT = torch.zeros(24, 16)


class Device:
    """A stream that runs behind the host. times_s: of each measured call, torch's and ours in turns. reached_after: with how much
    work before the first measurement the host launches everything in time."""

    def __init__(self, times_s: list[float], reached_after: int = HEAD_START) -> None:
        self.times_s = itertools.chain.from_iterable((0.0, time_s) for time_s in itertools.cycle(times_s))
        self.now_s, self.reached_after, self.num_flushes = 0.0, reached_after, 0

    def flush(self) -> None:
        self.num_flushes += 1

    def event(self, enable_timing: bool) -> Any:
        """Returns an event; of two that are made one after the other, the second is later by the next time."""
        assert enable_timing
        self.now_s += next(self.times_s)
        num_before, at_s = self.num_flushes, self.now_s  # before a try's first event there are its head start and one flush
        return SimpleNamespace(
            at_s=at_s,
            record=lambda: None,
            query=lambda: num_before < self.reached_after,
            synchronize=lambda: setattr(self, "num_flushes", 0),
            elapsed_time=lambda end: 1e3 * (end.at_s - at_s),
        )


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns a function that puts a device under `measure`."""

    def put(device: Device) -> Device:
        flush = SimpleNamespace(zero_=device.flush)
        used = ("randn", "zeros", "Generator", "uint8", "float32", "OutOfMemoryError", "__version__")
        names = {name: getattr(torch, name) for name in used}
        stand_in = SimpleNamespace(cuda=SimpleNamespace(Event=device.event), empty=lambda *_, **__: flush, **names)
        monkeypatch.setattr(linear_choice, "torch", stand_in)
        monkeypatch.setattr(linear_choice, "_ours_wins", {})
        monkeypatch.setattr(linear_choice, "_tries", Counter())
        monkeypatch.setattr(linear_choice, "ours", lambda x, weight, bias: torch.nn.functional.linear(x, weight, bias))
        return device

    return put


def decided() -> bool | None:
    return linear_choice._ours_wins.get((1, *WEIGHT.shape, WEIGHT.dtype))


def test_measuring_draws_from_nobodys_generator(on: Any) -> None:
    """A draw from a GPU's default generator fails while another thread captures a graph."""
    on(Device([2e-6, 1e-6]))
    torch.manual_seed(5)
    before = torch.get_rng_state()
    assert measure(WEIGHT, 1) == {"torch": pytest.approx(2e-6), "triton": pytest.approx(1e-6)}
    assert torch.equal(torch.get_rng_state(), before)
    assert decided() is True


@pytest.mark.parametrize("num_disturbed", [1, 3])
def test_few_disturbed_times_do_not_choose(on: Any, num_disturbed: int) -> None:
    """Some of ours took ten times as long, as if another stream had run meanwhile. With one it is still the faster; with three of
    seven nothing is decided, so that the size is measured again."""
    times = [3e-6, 2e-6] * (REPEATS - num_disturbed) + [3e-6, 20e-6] * num_disturbed
    on(Device(times))
    assert measure(WEIGHT, 1)
    assert decided() is (True if num_disturbed == 1 else None)
    on(Device([3e-6, 4e-6]))
    measure(WEIGHT, 1)
    assert decided() is False


def test_samples_that_overlap_are_not_apart() -> None:
    assert apart([1.0, 1.1, 1.2, 1.3], [2.0, 2.1, 2.2, 2.3])
    assert apart([2.0, 2.1, 2.2, 2.3], [1.0, 1.1, 1.2, 1.3])
    assert not apart([1.0, 1.5, 2.0, 2.5], [1.4, 1.6, 1.8, 2.0])


def test_a_size_is_measured_only_if_the_host_launches_ahead_of_the_device(on: Any) -> None:
    """Else the time of a launch would be counted. The device is given more to do first, up to a limit."""
    patient = on(Device([2e-6, 1e-6], reached_after=4 * HEAD_START))
    assert measure(WEIGHT, 1)
    assert patient.num_flushes == 0, "waited for"
    on(Device([2e-6, 1e-6], reached_after=2**HEAD_START_TRIES * HEAD_START))
    assert measure(WEIGHT, 1) == {}
    assert decided() is None


def test_a_size_that_stays_undecided_keeps_torchs_kernel(on: Any) -> None:
    on(Device([2e-6, 1e-6], reached_after=2**HEAD_START_TRIES * HEAD_START))
    for _ in range(MEASURE_TRIES):
        assert is_open(WEIGHT, 1)
        measure(WEIGHT, 1)
    assert not is_open(WEIGHT, 1)
    assert decided() is False


def written(folder: Path) -> list[Any]:
    """Returns what the file of choices holds, once it is there and no thread writes it."""
    for thread in threading.enumerate():
        if thread.name == "kernels":
            thread.join(10)
    (file,) = folder.iterdir()
    choices: list[Any] = json.loads(file.read_text())
    return choices


def test_choices_are_kept_for_the_next_engine(
    on: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """On another kind of GPU they are measured again, as they are where the file is damaged."""
    on(Device([2e-6, 1e-6]))
    gpu = "one"
    linear_choice.torch.cuda.get_device_name = lambda: gpu
    monkeypatch.setattr(linear_choice, "_kept_in", None)
    linear_choice.keep_in(tmp_path)
    measure(WEIGHT, 1)
    assert written(tmp_path) == [[1, *WEIGHT.shape, "float32", True]]
    linear_choice._ours_wins.clear()
    linear_choice.keep_in(tmp_path)
    assert decided() is True
    linear_choice._ours_wins.clear()
    gpu = "another"
    linear_choice.keep_in(tmp_path)
    assert decided() is None
    gpu = "one"
    (file,) = tmp_path.iterdir()
    for damaged in ("[[1, 2", '[[1, 2, 3, "no dtype", true]]', "[5]"):
        file.write_text(damaged)
        linear_choice.keep_in(tmp_path)
        assert decided() is None
        assert str(file) in caplog.text
        caplog.clear()


def test_without_memory_for_a_thread_a_choice_is_not_kept(
    on: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    on(Device([2e-6, 1e-6]))

    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(linear_choice, "_kept_in", tmp_path / "products.json")
    monkeypatch.setattr(threading.Thread, "start", refused)
    measure(WEIGHT, 1)
    assert decided() is True
    assert "is not kept for the next engine" in caplog.text
    assert "can't start new thread" in caplog.text


def test_a_thread_notes_its_own_products_alone() -> None:
    """Weights of another thread's model may be unmapped by the time this one measures them."""
    mine, others, noted = torch.ones(4, 16), torch.ones(6, 16), []
    x = torch.ones(8, 16)
    with weights_of_products() as weights:
        other = threading.Thread(target=lambda: linear_choice.linear(x, others, None))
        other.start()
        other.join()
        linear_choice.linear(x, mine, None)
        noted += weights
    linear_choice.linear(x, mine, None)
    assert len(noted) == len(weights) == 1
    assert weights[0] is mine
