"""Host memory is registered with a device that wants that, range by range. What cannot be registered is used as it is."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

import pytest

from engine.cpu.memory import CpuMemory
from engine.cuda.backend import CudaBackend
from engine.loading.runner import TorchRunner
from engine.memory import host_registration
from engine.memory.host_registration import RegistersHost, register
from engine.memory.host_tier import HostTier
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
