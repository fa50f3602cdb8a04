"""Host memory is registered with a device that wants that, range by range. What cannot be registered is used as it is."""

from __future__ import annotations

import logging
import mmap
import os
import re
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from engine.cpu.backend import CpuBackend
from engine.cpu.memory import CpuMemory
from engine.cuda.backend import CudaBackend
from engine.loading.runner import TorchRunner
from engine.memory import host_registration, mappings
from engine.memory.host_registration import RegistersHost, register
from engine.memory.host_tier import HostTier
from engine.null.runner import NullRunner
from engine.protocol import Configure
from tests.engine.model_bench import BLOCK_TOKENS

CHUNK = 1 << 20


class Registering(CpuMemory):
    """A memory that records what is registered with it. limit_bytes: registering more than this is refused."""

    limit_bytes = 1 << 40
    registered: tuple[tuple[int, int], ...] = ()

    def register_host(self, address: int, num_bytes: int) -> None:
        self.registered = (*self.registered, (address, num_bytes))
        if sum(size for _, size in self.registered) > self.limit_bytes:
            raise MemoryError("cuMemHostRegister: CUDA_ERROR_OUT_OF_MEMORY")

    def unregister_host(self, address: int, memory: object) -> None:
        self.registered = tuple(one for one in self.registered if one[0] != address)


def test_masks_are_registered_until_they_are_unlocked(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    memory = Registering(4, CHUNK)
    options = Configure("cuda:0", 4, CHUNK, 0, 512, BLOCK_TOKENS, 10.0, 1, cache_dir=str(tmp_path))
    runner = TorchRunner(CudaBackend(memory, options), options)
    runner._kernels.result(60)
    before = memory.registered
    bits = np.frombuffer(mmap.mmap(-1, 8192), np.uint32).reshape(2, -1)
    locked = runner.lock_masks(bits)
    assert locked is not None
    assert (locked.bits is bits, locked.is_locked) == (True, True)
    assert memory.registered == (*before, (bits.ctypes.data, 8192))
    for _ in range(2):
        runner.unlock_masks(locked)
        assert (locked.is_locked, memory.registered) == (False, before)
    memory.limit_bytes = 0
    assert runner.lock_masks(bits) is None
    told = [record.message for record in caplog.records if "grammar masks" in record.message]
    assert told == ["grammar masks: not registered with the device: cuMemHostRegister: CUDA_ERROR_OUT_OF_MEMORY"]


def test_devices_that_copy_nothing_lock_no_masks(tmp_path: Path) -> None:
    options = Configure("cpu", 4, CHUNK, 0, 512, BLOCK_TOKENS, 10.0, 1, cache_dir=str(tmp_path))
    bits = np.zeros((2, 1024), np.uint32)
    assert TorchRunner(CpuBackend(CpuMemory(4, CHUNK), options), options).lock_masks(bits) is None
    assert NullRunner(options).lock_masks(bits) is None


def test_ranges_cover_each_span_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(host_registration, "RANGE_BYTES", 100)
    memory = Registering(2, CHUNK)
    with caplog.at_level(logging.INFO, "engine"):
        assert register(memory, "host tier", [(5000, 250), (9000, 100)], unit_bytes=30) == 350
        assert memory.registered == ((5000, 90), (5090, 90), (5180, 70), (9000, 90), (9090, 10))
        assert "s a GiB" in caplog.text
        memory.limit_bytes = 500
        assert register(memory, "host tier", [(20_000, 250)], unit_bytes=200) == 0
        memory.limit_bytes = 700
        assert register(memory, "host tier", [(30_000, 250)], unit_bytes=50) == 100
        assert (
            "host tier: 0.00 of 0.00 GiB are registered with the device: cuMemHostRegister: CUDA_ERROR_OUT_OF_MEMORY" in caplog.text
        )
    memory.close()


class PagesFirst(CpuMemory):
    """A memory that refuses to register what has no pages yet. fd: of the memfd that is registered; its tier begins at address."""

    fd, address, num_ranges = -1, 0, 0

    def register_host(self, address: int, num_bytes: int) -> None:
        begin = address - self.address
        assert os.lseek(self.fd, begin, os.SEEK_DATA) == begin
        assert os.lseek(self.fd, begin, os.SEEK_HOLE) >= begin + num_bytes
        self.num_ranges += 1


def test_the_driver_finds_pages_and_contents_stay(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A tier of which one slot was filled by an engine before."""
    monkeypatch.setattr(host_registration, "RANGE_BYTES", 2 * CHUNK)
    monkeypatch.setattr(host_registration, "POPULATED_BYTES", CHUNK // 2)
    memory = PagesFirst(1, CHUNK)
    memory.fd = os.memfd_create("tier")
    os.ftruncate(memory.fd, 5 * CHUNK)
    os.pwrite(memory.fd, b"kept" * (CHUNK // 4), 3 * CHUNK)
    tier = HostTier(os.dup(memory.fd), 5, CHUNK)
    memory.address = tier.span[0]
    with caplog.at_level(logging.INFO, "engine"):
        assert register(memory, "host tier", [tier.span], CHUNK) == 5 * CHUNK
    assert memory.num_ranges == 3
    assert bytes(tier.slot(3)) == b"kept" * (CHUNK // 4)
    assert not any(tier.slot(slot).any() for slot in (0, 1, 2, 4))
    told = r"host tier: 0.00 GiB registered with the device in \d.\d s, [\d.]+ s a GiB: [\d.]+ making pages, [\d.]+ in the driver"
    assert re.search(told + "$", caplog.text, re.MULTILINE)
    os.close(memory.fd)
    memory.close()


def test_where_the_system_makes_no_pages_the_driver_does(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    asked: list[int] = []
    monkeypatch.setattr(mappings, "populate", lambda address, num_bytes: asked.append(num_bytes))  # None, as if refused
    memory = Registering(1, CHUNK)
    with caplog.at_level(logging.INFO, "engine"):
        assert register(memory, "host tier", [(1 << 30, 200 << 20)], unit_bytes=16 << 20) == 200 << 20
    assert [size >> 20 for _, size in memory.registered] == [64, 64, 64, 8]
    assert asked == [16 << 20]
    assert "making pages (the system refused to make them all)" in caplog.text
    memory.close()


def test_the_driver_is_left_to_others_most_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver gets one of four seconds a range. The time in which pages are made counts towards the other three."""
    now_s, begun_s = 0.0, []

    def passes(seconds: float) -> bool:
        nonlocal now_s
        now_s += seconds
        return True

    def registers(address: int, num_bytes: int) -> None:
        begun_s.append(now_s)
        passes(1.0)

    monkeypatch.setattr(host_registration, "time", SimpleNamespace(perf_counter=lambda: now_s, sleep=passes))
    monkeypatch.setattr(mappings, "populate", lambda address, num_bytes: passes(2.0 if address == 0 else 0.5))
    memory = SimpleNamespace(register_host=registers)
    monkeypatch.setattr(host_registration, "RANGE_BYTES", 100)
    register(memory, "host tier", [(0, 300)], unit_bytes=100, share=0.25)
    assert begun_s == [2.0, 6.0, 10.0]
    assert now_s == 11.0
    begun_s.clear()
    register(memory, "staging", [(1000, 300)], unit_bytes=100)
    assert begun_s == [11.5, 13.0, 14.5]


def test_a_runner_registers_its_tier_after_what_loads_wait_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order, all_done = list[str](), threading.Event()

    def noted(memory: object, what: str, *_: object) -> None:
        order.append(what)
        if what == "host tier":
            all_done.set()

    def prepare(backend: CudaBackend, tell: object) -> None:
        all_done.wait(0.1)  # long enough for a tier that does not wait
        order.append("kernels")

    monkeypatch.setattr("engine.loading.runner.register", noted)
    monkeypatch.setattr(CudaBackend, "prepare", prepare)
    fd = os.memfd_create("tier")
    os.ftruncate(fd, CHUNK)
    memory = Registering(4, CHUNK)
    options = Configure("cuda:0", 4, CHUNK, 0, 512, BLOCK_TOKENS, 10.0, 1, cache_dir=str(tmp_path))
    TorchRunner(CudaBackend(memory, options), options, HostTier(fd, 1, CHUNK))
    assert all_done.wait(30)
    assert order == ["staging", "kernels", "host tier"]


def test_a_runner_registers_its_staging_buffers_and_the_whole_tier(tmp_path: Path) -> None:
    fd = os.memfd_create("tier")
    os.ftruncate(fd, 3 * CHUNK)
    tier = HostTier(fd, 3, CHUNK)
    memory = Registering(4, CHUNK)
    assert isinstance(memory, RegistersHost)
    assert not isinstance(CpuMemory(1, CHUNK), RegistersHost)
    options = Configure("cuda:0", 4, CHUNK, 0, 512, BLOCK_TOKENS, 10.0, 1, cache_dir=str(tmp_path))
    runner = TorchRunner(CudaBackend(memory, options), options, tier)
    runner._kernels.result(60)
    wanted = {tier.span, runner._ring.span}
    until_s = time.monotonic() + 30
    while set(memory.registered) != wanted:
        assert time.monotonic() < until_s
        time.sleep(0.01)
    assert runner._ring.take().nbytes == runner._ring.slot_bytes
