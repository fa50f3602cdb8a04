"""engine/cuda/memory.py passes the suite of the cpu device's memory on a stand-in for the driver, and what the driver counts
is right. tests/gpu runs the same suite on a GPU.
"""

from __future__ import annotations

import os
import resource
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from engine.contracts.loads import LoadTask
from engine.cuda import backend
from engine.loading.left_weights import adopt, checksum_of
from engine.memory import handles
from engine.memory.weight_range import WeightRange
from engine.protocol import Configure, WeightsHeld
from loader.packing import checksum
from tests.engine import cuda_stand_in
from tests.engine.engine_process import load_message
from tests.engine.test_memory import CHUNK, MemorySuite

assert CHUNK % cuda_stand_in.GRANULARITY == 0


@pytest.fixture
def driver() -> cuda_stand_in.Driver:
    driver = cuda_stand_in.Driver()
    driver.needs_context = True
    return driver


@pytest.fixture
def cuda_memory(driver: cuda_stand_in.Driver, monkeypatch: pytest.MonkeyPatch) -> Any:
    return cuda_stand_in.install(monkeypatch, driver)


@pytest.fixture
def memory(cuda_memory: Any, driver: cuda_stand_in.Driver) -> Iterator[Any]:
    made = cuda_memory.CudaMemory(12, CHUNK)
    yield made
    made.close()
    assert not driver.mapped
    assert driver.held_bytes == 0


class TestCudaMemory(MemorySuite):
    pass


def test_chunks_are_taken_once_and_mapped_twice_at_most(memory: Any, driver: cuda_stand_in.Driver) -> None:
    assert driver.held_bytes == 12 * CHUNK
    address = memory.reserve(2 * CHUNK)
    memory.map(address, [3, 7])
    assert driver.held_bytes == 12 * CHUNK
    assert len(driver.mapped) == 14
    memory.unmap(address, 2 * CHUNK)
    memory.release(address, 2 * CHUNK)
    assert len(driver.mapped) == 12


class HeldDriver:
    """Holds back the driver's unmapping of one range until `go` is set, and notes the threads it happens in."""

    def __init__(self, driver: cuda_stand_in.Driver, address: int, num_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go, self.threads = threading.Event(), list[str]()
        unmap, contexts = driver.cuMemUnmap, threading.local()
        enter = driver.cuCtxSetCurrent

        def entered(context: str) -> Any:
            contexts.current = context
            return enter(context)

        def cuMemUnmap(place: int, size: int) -> Any:
            if address <= place < address + num_bytes:
                assert contexts.current == "context"
                self.threads.append(threading.current_thread().name)
                assert self.go.wait(30)
            return unmap(place, size)

        monkeypatch.setattr(driver, "cuCtxSetCurrent", entered)
        monkeypatch.setattr(driver, "cuMemUnmap", cuMemUnmap)


def test_chunks_are_used_again_before_the_driver_has_unmapped_them(
    memory: Any, driver: cuda_stand_in.Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = WeightRange(memory, 2 * CHUNK), WeightRange(memory, 2 * CHUNK)
    first.map([3, 7])
    held = HeldDriver(driver, first.address, 2 * CHUNK, monkeypatch)
    first.unmap()
    second.map([7, 3])
    second.tensor(0, (CHUNK,), torch.uint8).fill_(5)
    assert (memory.arena[7 * CHUNK : 8 * CHUNK] == 5).all()
    assert len(driver.mapped) == 12 + 4
    held.go.set()
    first.close()
    second.close()
    assert held.threads == ["unmapping"] * 2


@pytest.mark.parametrize("what", ["map", "release", "close"])
def test_what_needs_a_range_waits_until_it_is_unmapped(
    cuda_memory: Any, driver: cuda_stand_in.Driver, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """The driver would refuse each of them before, and the stand-in does."""
    memory = cuda_memory.CudaMemory(12, CHUNK)
    weights = WeightRange(memory, 2 * CHUNK)
    weights.map([3, 7])
    held = HeldDriver(driver, weights.address, 2 * CHUNK, monkeypatch)
    weights.unmap()
    calls = {"map": lambda: weights.map([1, 2]), "release": weights.close, "close": memory.close}
    called = threading.Thread(target=calls[what])
    called.start()
    called.join(0.05)
    assert called.is_alive()
    assert len(driver.mapped) == 14
    held.go.set()
    called.join(30)
    assert len(driver.mapped) == {"map": 14, "release": 12, "close": 0}[what]
    if what == "map":
        weights.close()
    if what != "close":
        memory.close()
    assert not driver.mapped


@pytest.mark.parametrize("refused", ["cuMemMap", "cuMemSetAccess"])
def test_a_range_that_is_refused_can_be_mapped_later(
    memory: Any, driver: cuda_stand_in.Driver, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    weights, real, calls = WeightRange(memory, 3 * CHUNK), getattr(driver, refused), []

    def call(*arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) == (2 if refused == "cuMemMap" else 1):
            return (cuda_stand_in.CUresult.CUDA_ERROR_OUT_OF_MEMORY,)
        return real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(driver, refused, call)
        with pytest.raises(MemoryError):
            weights.map([3, 7, 9])
    weights.unmap()
    weights.map([3, 7, 9])
    weights.close()


def test_an_error_of_the_thread_that_unmaps_is_told(
    cuda_memory: Any, driver: cuda_stand_in.Driver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    memory = cuda_memory.CudaMemory(12, CHUNK)
    weights, other = WeightRange(memory, 2 * CHUNK), WeightRange(memory, CHUNK)
    other.map([1])
    weights.map([3, 7])

    def cuMemUnmap(place: int, size: int) -> Any:
        return (cuda_stand_in.CUresult.CUDA_ERROR_INVALID_VALUE,)

    monkeypatch.setattr(driver, "cuMemUnmap", cuMemUnmap)
    weights.unmap()
    why = "unmapping chunks failed before: cuMemUnmap: CUDA_ERROR_INVALID_VALUE"
    with pytest.raises(RuntimeError, match=why):
        weights.map([3, 7])
    for call in (other.unmap, memory.close, lambda: memory.release(weights.address, 2 * CHUNK)):
        with pytest.raises(RuntimeError, match=why):
            call()
    assert "unmapping chunks failed: cuMemUnmap: CUDA_ERROR_INVALID_VALUE" in caplog.text


def test_host_memory_is_unregistered_and_unmapped_behind_the_steps_launched_so_far(
    cuda_memory: Any, memory: Any, driver: cuda_stand_in.Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    passed, waits = threading.Event(), threading.Event()

    class Fence:
        def wait(self) -> None:
            waits.set()
            passed.wait(30)

    monkeypatch.setattr(memory._streams, "steps_so_far", Fence)
    held = np.zeros(8192, np.uint8)
    address, gone = held.ctypes.data, weakref.ref(held)
    memory.register_host(address, 8192)
    memory.unregister_host(address, held)
    del held
    assert waits.wait(30)
    assert driver.registered == [(address, 8192)]
    assert gone() is not None
    passed.set()
    until_s = time.monotonic() + 30
    while driver.registered or gone() is not None:
        assert time.monotonic() < until_s
        time.sleep(0.01)


def test_host_memory_that_stays_registered_stays_mapped(
    memory: Any, driver: cuda_stand_in.Driver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    done = threading.Event()

    def cuMemHostUnregister(address: int) -> Any:
        done.set()
        return (cuda_stand_in.CUresult.CUDA_ERROR_INVALID_VALUE,)

    monkeypatch.setattr(driver, "cuMemHostUnregister", cuMemHostUnregister)
    held = np.zeros(8192, np.uint8)
    memory.unregister_host(held.ctypes.data, held)
    assert done.wait(30)
    until_s = time.monotonic() + 30
    while not memory._never_unmapped:
        assert time.monotonic() < until_s
        time.sleep(0.01)
    assert memory._never_unmapped == [held]
    assert "host memory stays registered with the device: cuMemHostUnregister: CUDA_ERROR_INVALID_VALUE" in caplog.text


def test_without_memory_for_a_thread_host_memory_stays_registered(
    memory: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def start(thread: threading.Thread) -> None:
        raise MemoryError(f"thread {thread.name}: no memory")

    monkeypatch.setattr("engine.cuda.memory.Thread.start", start)
    held = np.zeros(8192, np.uint8)
    memory.unregister_host(held.ctypes.data, held)
    assert memory._never_unmapped == [held]
    assert "host memory stays registered with the device: thread unregistering: no memory" in caplog.text


def test_a_device_that_cannot_give_its_memory_keeps_nothing(cuda_memory: Any, driver: cuda_stand_in.Driver) -> None:
    driver.limit_bytes = 5 * CHUNK
    with pytest.raises(MemoryError, match="cuMemCreate: CUDA_ERROR_OUT_OF_MEMORY"):
        cuda_memory.CudaMemory(6, CHUNK)
    assert driver.held_bytes == 0
    assert not driver.reserved


def test_chunks_of_another_granularity(cuda_memory: Any) -> None:
    with pytest.raises(ValueError, match="not a multiple of the device's granularity"):
        cuda_memory.CudaMemory(6, CHUNK + 4096)


def test_chunks_are_exported_and_had_again(cuda_memory: Any, driver: cuda_stand_in.Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another memory imports the chunks after the one that made them was closed. They keep their content, and no further memory is
    taken."""
    first = cuda_memory.CudaMemory(5, CHUNK, exportable=True)
    weights = WeightRange(first, 2 * CHUNK + 100)
    weights.map([3, 0, 4])
    weights.tensor(0, (2 * CHUNK + 100,), torch.uint8)[:] = torch.arange(2 * CHUNK + 100).remainder(251).byte()
    kept, told = first.export(), first.checksum(weights.address, 2 * CHUNK + 100)
    assert told == checksum.of(torch.arange(2 * CHUNK + 100).remainder(251).byte().numpy())
    weights.close()
    first.close()
    assert not driver.mapped
    with pytest.raises(ValueError, match="5 handles that are not those of 6 chunks"):
        cuda_memory.CudaMemory(6, CHUNK, handles=kept)
    driver.limit_bytes = 5 * CHUNK
    second = cuda_memory.CudaMemory(5, CHUNK, handles=kept)
    again = WeightRange(second, 2 * CHUNK + 100)
    again.map([3, 0, 4])
    assert second.checksum(again.address, 2 * CHUNK + 100) == told
    total = checksum_of(second, np.array([3, 0, 4], np.int32), 2 * CHUNK + 100)
    monkeypatch.setattr("engine.memory.transfers.NUM_THREADS", 1)  # Triton's interpreter works in one thread only
    for left_checksum, adopted in ((total, True), (total + 1, False)):
        spec = load_message("path")
        left = WeightsHeld(1, "m", spec.fingerprint, spec.dtype, "", 2 * CHUNK + 100, [3, 0, 4], left_checksum)
        task = LoadTask(spec, np.array([3, 0, 4], np.int32), lambda done, total: None, lambda: False, left)
        assert adopt(second, task, again) == task.adopted == adopted
    again.close()
    second.close()
    for fd in kept:
        os.close(fd)
    with pytest.raises(cuda_memory.DeviceError, match="cuMemImportFromShareableHandle: CUDA_ERROR_INVALID_VALUE"):
        cuda_memory.CudaMemory(5, CHUNK, handles=kept)
    assert driver.held_bytes == 0
    assert not driver.reserved


def test_each_call_is_made_in_a_context(cuda_memory: Any, driver: cuda_stand_in.Driver) -> None:
    """Any thread may call any method, and a new thread has no context."""
    memory = cuda_memory.CudaMemory(5, CHUNK, exportable=True)
    source, place = np.zeros(CHUNK, np.uint8), memory.arena.data_ptr()
    reserved = memory.reserve(CHUNK)
    calls: list[Callable[[], Any]] = [
        lambda: memory.reserve(CHUNK),
        lambda: memory.map(reserved, [0]),
        lambda: memory.copy_in(place, source).wait(),
        lambda: memory.copy_out(place, source).wait(),
        lambda: memory.write(place, source),
        lambda: memory.checksum(place, CHUNK),
        lambda: memory.register_host(source.ctypes.data, CHUNK),
        lambda: memory.unregister_host(source.ctypes.data, source),
        lambda: handles.close(memory.export()),
        lambda: memory.unmap(reserved, CHUNK),
        lambda: memory.release(reserved, CHUNK),
        memory.close,
    ]
    for call in calls:
        with ThreadPoolExecutor(1) as new:
            new.submit(call).result()


def test_more_chunks_than_a_process_may_open_files_are_not_exported(cuda_memory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made = cuda_memory.CudaMemory(5, CHUNK, exportable=True)
    monkeypatch.setattr(resource, "getrlimit", lambda which: (100, handles.OTHER_FILES + 4))
    monkeypatch.setattr(resource, "setrlimit", lambda which, limits: None)
    with pytest.raises(OSError, match=r"5 descriptors are more than a process may have here: 516 files"):
        made.export()
    made.close()


def test_descriptors_are_closed_where_the_device_refuses_their_memory(
    cuda_memory: Any, driver: cuda_stand_in.Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = cuda_stand_in.CUresult.CUDA_ERROR_INVALID_VALUE
    driver.make_context()
    monkeypatch.setattr(driver, "cuMemImportFromShareableHandle", lambda *_: (refused, None))
    given = [os.memfd_create("left") for _ in range(2)]
    handover: Any = SimpleNamespace(ask=lambda num_chunks, chunk_bytes: (given, []))
    with pytest.raises(cuda_memory.DeviceError):
        backend.open_device(Configure("cuda:0", 2, CHUNK, 0, 512, 16, 10.0, 1), handover)
    for descriptor in given:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)


def test_an_export_that_fails_leaves_no_descriptor_open(
    cuda_memory: Any, driver: cuda_stand_in.Driver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Thousands of them would be left, and no file could be opened any more."""
    made = cuda_memory.CudaMemory(5, CHUNK, exportable=True)
    export, num_exported = driver.cuMemExportToShareableHandle, 0

    def refuse_the_fourth(*arguments: Any) -> Any:
        nonlocal num_exported
        num_exported += 1
        return (cuda_stand_in.CUresult.CUDA_ERROR_INVALID_VALUE, None) if num_exported == 4 else export(*arguments)

    refuse_the_fourth.__name__ = "cuMemExportToShareableHandle"
    monkeypatch.setattr(driver, "cuMemExportToShareableHandle", refuse_the_fourth)
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(cuda_memory.DeviceError, match="cuMemExportToShareableHandle: CUDA_ERROR_INVALID_VALUE"):
        made.export()
    assert set(os.listdir("/proc/self/fd")) == before
    made.close()


@pytest.mark.parametrize("out", [False, True])
@pytest.mark.parametrize("fails", ["a copy", "memory for sums", "the sums"])
def test_copies_that_were_started_end_before_an_error_is_raised(
    memory: Any, driver: cuda_stand_in.Driver, monkeypatch: pytest.MonkeyPatch, out: bool, fails: str
) -> None:
    """The driver refuses the third copy of a batch, torch has no memory for the sums, or they cannot be launched: what was started
    has been waited for."""
    address, host = memory.arena.data_ptr(), np.zeros(4096, np.uint8)
    pieces = [(address + at, host[at : at + 1024]) for at in range(0, 4096, 1024)]
    copies, waited = sys.modules["engine.cuda.copies"], list[int]()
    name, num_copies = "cuMemcpyDtoHAsync" if out else "cuMemcpyHtoDAsync", 0
    copy, synchronize = getattr(driver, name), cuda_stand_in.Event.synchronize

    def copied(*arguments: Any) -> Any:
        nonlocal num_copies
        if fails == "a copy" and num_copies == 2:
            return (cuda_stand_in.CUresult.CUDA_ERROR_INVALID_VALUE,)
        num_copies += 1
        return copy(*arguments)

    def no_memory(*arguments: Any, **options: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    def wait(self: cuda_stand_in.Event) -> None:
        waited.append(num_copies)
        synchronize(self)

    copied.__name__ = name
    monkeypatch.setattr(driver, name, copied)
    monkeypatch.setattr(cuda_stand_in.Event, "synchronize", wait)
    if fails == "memory for sums":
        monkeypatch.setattr(copies.torch, "empty", no_memory, raising=False)
    elif fails == "the sums":
        monkeypatch.setattr(copies, "triton_checksum", SimpleNamespace(num_programs=lambda words: 1, partial_sums=no_memory))
    error = sys.modules["engine.cuda.memory"].DeviceError if fails == "a copy" else torch.OutOfMemoryError
    with pytest.raises(error):
        memory.start_several(pieces, out)
    assert waited == [2 if fails == "a copy" else 4]
