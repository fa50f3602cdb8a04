"""The suite of tests/engine/test_memory.py on CUDA's virtual memory, and what only a device can show."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from engine.memory.weight_range import WeightRange
from tests.engine.test_handles import outlive
from tests.engine.test_memory import CHUNK, MemorySuite

pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

if TYPE_CHECKING:
    from engine.memory.cuda_memory import CudaMemory


@pytest.fixture
def memory() -> Iterator[CudaMemory]:
    from engine.memory.cuda_memory import CudaMemory

    made = CudaMemory(12, CHUNK, exportable=True)
    yield made
    made.close()


class TestCudaMemory(MemorySuite):
    pass


def free_bytes() -> int:
    torch.cuda.synchronize()
    return int(torch.cuda.mem_get_info()[0])


def test_all_memory_is_taken_once(memory: CudaMemory) -> None:
    """Mapping and unmapping a model's weights takes nothing more and leaves at most 1 MiB behind."""
    before = free_bytes()
    held = WeightRange(memory, 10 * CHUNK)
    for first in (0, 1, 2):
        held.map([(first + number) % 12 for number in range(10)])
        held.tensor(0, (10 * CHUNK,), torch.uint8).fill_(first)
        held.unmap()
    assert before - free_bytes() <= 1 << 20
    held.close()


def test_a_graph_survives_an_eviction(memory: CudaMemory) -> None:
    """Captured on the first load, replayed on other chunks after the second."""
    held = WeightRange(memory, 2 * CHUNK)
    held.map([0, 1])
    weight = held.tensor(0, (64, 64), torch.float32)
    weight.fill_(1.0)
    x = torch.ones(4, 64, device="cuda")
    (x @ weight).sum()  # libraries set themselves up outside the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        product = x @ weight
    graph.replay()
    torch.cuda.synchronize()
    assert (product == 64.0).all()
    held.unmap()
    held.map([7, 5])
    weight.fill_(2.0)
    graph.replay()
    torch.cuda.synchronize()
    assert (product == 128.0).all()
    held.close()


def test_weights_outlive_their_process() -> None:
    """Killed before its handles are taken in."""
    outlive(("cuda_memory", "CudaMemory", "exportable=True, "))


def test_touching_evicted_weights_is_a_fault() -> None:
    program = f"""
import torch
from engine.memory.cuda_memory import CudaMemory
from engine.memory.weight_range import WeightRange
memory = CudaMemory(4, {CHUNK})
weights = WeightRange(memory, {2 * CHUNK})
weights.map([1, 3])
tensor = weights.tensor(0, (1000,), torch.float32)
tensor.fill_(1.0)
weights.unmap()
print("mapped and unmapped", flush=True)
print(tensor.sum().item())
"""
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, timeout=120, check=False)
    assert b"mapped and unmapped" in done.stdout, done.stderr.decode()
    assert done.returncode != 0
    assert b"illegal" in done.stderr.lower()


def test_registered_host_memory_goes_there_and_back(memory: CudaMemory) -> None:
    """A memfd's pages, as the host tier's are; what comes back is what was written."""
    from engine.memory.host_registration import register
    from engine.memory.host_tier import HostTier

    fd = os.memfd_create("tier")
    os.ftruncate(fd, 2 * CHUNK)
    tier = HostTier(fd, 2, CHUNK)
    tier.slot(1)[:] = 7
    assert register(memory, "host tier", [tier.span], CHUNK) == 2 * CHUNK
    told = memory.copy_in(memory.arena.data_ptr() + 3 * CHUNK, tier.slot(1)).wait()
    assert (memory.arena[3 * CHUNK : 4 * CHUNK] == 7).all()
    assert memory.copy_out(memory.arena.data_ptr() + 3 * CHUNK, tier.slot(0)).wait() == told
    assert (tier.slot(0) == 7).all()
