"""A load waits until the kernels have been looked up, but not until they are compiled. While it waits it reports progress and can
be cancelled. If the look-up fails, so does the load.
"""

from __future__ import annotations

import threading
from concurrent.futures import wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine.contracts.loads import LoadCancelled
from engine.cpu import backend as cpu_backend
from engine.cpu.ops import CpuOps
from engine.loading import kernel_wait
from engine.protocol import LoadModel
from loader.configs.kernel_sets import KernelSet
from tests.engine.model_bench import MAX_LEN, load, load_task, make_checkpoint, make_memory, make_runner


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_checkpoint(tmp_path)
    return tmp_path


def spec(folder: Path) -> LoadModel:
    return LoadModel(1, "tiny", str(folder), "float32", "", 1 << 10, 0, 0, MAX_LEN, 8, [1])


def test_kernels_that_fail_to_build_fail_the_load(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    def broken(cache_dir: str, **options: Any) -> CpuOps:
        raise OSError("no compiler")

    monkeypatch.setattr(cpu_backend, "CpuOps", broken)
    with pytest.raises(RuntimeError, match="kernels: no compiler"):
        load(make_runner(make_memory()), folder)


def test_what_kept_kernels_from_being_found_may_be_mended(
    monkeypatch: pytest.MonkeyPatch, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A disk that was full as the engine started, or memory that it lacked then, is no reason to refuse all loads for its life."""
    num_looked = 0

    def full_at_first(cache_dir: str, **options: Any) -> CpuOps:
        nonlocal num_looked
        num_looked += 1
        if num_looked == 1:
            raise OSError("No space left on device")
        return CpuOps(cache_dir, **options)

    monkeypatch.setattr(cpu_backend, "CpuOps", full_at_first)
    runner = make_runner(make_memory())
    wait([runner._kernels])
    for _ in range(2):
        load(runner, folder).release()
    assert num_looked == 2
    assert "kernels are looked for again: OSError: No space left on device" in caplog.text


def test_a_load_tells_that_it_waits_for_kernels(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    looked = threading.Event()
    monkeypatch.setattr(kernel_wait, "KERNEL_WAIT_EVERY_S", 0.01)
    monkeypatch.setattr(cpu_backend, "CpuOps", lambda cache_dir, **options: CpuOps(cache_dir, use_kernels=not looked.wait(10)))
    told: list[tuple[int, int]] = []

    def progress(bytes_done: int, bytes_total: int) -> None:
        told.append((bytes_done, bytes_total))
        looked.set()

    task = load_task(spec(folder), progress=progress)
    model = make_runner(make_memory()).load(task)
    assert told[0] == (0, 0)
    assert all(total for _, total in told[-1:])
    assert task.kernels_seconds > 0
    model.release()


def test_a_load_that_waits_for_kernels_can_be_cancelled(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    looked = threading.Event()
    monkeypatch.setattr(kernel_wait, "KERNEL_WAIT_EVERY_S", 0.01)
    monkeypatch.setattr(cpu_backend, "CpuOps", lambda cache_dir, **options: CpuOps(cache_dir, use_kernels=not looked.wait(10)))
    with pytest.raises(LoadCancelled, match="kernels"):
        make_runner(make_memory()).load(load_task(spec(folder), cancelled=lambda: True))
    looked.set()


def test_a_load_does_not_wait_for_compilers_that_stand_still() -> None:
    told: list[str] = []
    builds = SimpleNamespace(stall="", problems={})
    backend: Any = SimpleNamespace(_ops=SimpleNamespace(awaited=lambda sets: True), _builds=builds)

    def waiting() -> None:
        assert not told, "it goes on waiting"
        told.append("waits")
        builds.stall = "no kernel was compiled for 300 s"

    with pytest.raises(RuntimeError, match=r"too slow to be served: no kernel was compiled for 300 s$"):
        cpu_backend.CpuBackend._until_in_use(backend, KernelSet("bfloat16", "packed"), waiting)
    assert told == ["waits"]
