"""The suite of tests/engine/test_memory.py on CUDA's virtual memory, and what only a device can show."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from engine.cuda.sink import DeviceSink
from engine.memory import transfers
from engine.memory.host_registration import register
from engine.memory.transfers import copies_several, transfer
from engine.memory.weight_range import WeightRange
from loader.packing import checksum
from loader.reading.landings import Places
from loader.reading.sinks import HostSink
from loader.reading.staging import StagingRing
from loader.reading.weight_stream import open_checkpoint, planned_reads, stream_weights
from loader.sizes import layout
from tests.engine.model_bench import CASES, make_checkpoint
from tests.engine.test_handles import outlive
from tests.engine.test_memory import CHUNK, MemorySuite

pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

if TYPE_CHECKING:
    from engine.cuda.memory import CudaMemory

registered: list[StagingRing] = []  # for the life of the process, or the driver would take what comes to their addresses for them


@pytest.fixture
def memory() -> Iterator[CudaMemory]:
    from engine.cuda.memory import CudaMemory

    made = CudaMemory(12, CHUNK, exportable=True)
    yield made
    made.close()


class TestCudaMemory(MemorySuite):
    pass


def free_bytes() -> int:
    torch.cuda.synchronize()
    return int(torch.cuda.mem_get_info()[0])


def test_all_memory_is_taken_once(memory: CudaMemory) -> None:
    """Mapping and unmapping a model's weights takes nothing more and leaves at most 1 MiB behind. The device is not this process's
    alone while tests run side by side: what others take shows in one attempt, what we leave behind in each."""
    taken = []
    for _ in range(5):
        before = free_bytes()
        held = WeightRange(memory, 10 * CHUNK)
        for first in (0, 1, 2):
            held.map([(first + number) % 12 for number in range(10)])
            held.tensor(0, (10 * CHUNK,), torch.uint8).fill_(first)
            held.unmap()
        memory._unmapping.finish()
        taken.append(before - free_bytes())
        held.close()
        if abs(taken[-1]) <= 1 << 20:
            return
    raise AssertionError(f"bytes that three loads took, in five attempts: {taken}")


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
    outlive(("cuda.memory", "CudaMemory", "exportable=True, "))


def test_touching_evicted_weights_is_a_fault() -> None:
    program = f"""
import torch
from engine.cuda.memory import CudaMemory
from engine.memory.weight_range import WeightRange
memory = CudaMemory(4, {CHUNK})
weights = WeightRange(memory, {2 * CHUNK})
weights.map([1, 3])
tensor = weights.tensor(0, (1000,), torch.float32)
tensor.fill_(1.0)
weights.unmap()
memory._unmapping.finish()
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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_reach_the_gpu_as_they_reach_the_host(memory: CudaMemory, tmp_path: Path, dtype: str) -> None:
    """Through two slots that are filled again and again; what has landed is there."""
    make_checkpoint(tmp_path, **CASES["llama"])
    memory.arena.zero_()  # between parameters nothing is written
    with ExitStack() as stack:
        source = open_checkpoint(tmp_path, "", stack, in_place=False)
        wanted = np.zeros(layout.weights_bytes(source.shape, dtype), np.uint8)
        stream_weights(source, dtype, HostSink(wanted.data), StagingRing(), lambda done, total: None, lambda: False)
        weights = WeightRange(memory, len(wanted))
        weights.map(list(range(weights.num_chunks)))
        held, ring, told = memory.tensor(weights.address, len(wanted)), StagingRing(2, 8 << 10), []
        assert register(memory, "staging", [ring.span], ring.slot_bytes) == ring.span[1]
        registered.append(ring)

        def landed(places: Places) -> None:
            for begin, end in places:
                assert np.array_equal(held[begin:end].cpu().numpy(), wanted[begin:end])
            told.append(places)

        sink = DeviceSink(memory, weights)
        stream_weights(source, dtype, sink, ring, lambda done, total: None, lambda: False, landed=landed)
        assert len(told) == len(planned_reads(source, dtype, ring))
    assert np.array_equal(held.cpu().numpy(), wanted)
    weights.close()


@pytest.mark.parametrize("in_batches", [False, True])
@pytest.mark.parametrize("pinned", [False, True])
def test_many_pieces_are_under_way(memory: CudaMemory, monkeypatch: pytest.MonkeyPatch, pinned: bool, in_batches: bool) -> None:
    """From page-locked and from ordinary memory, of mixed sizes and odd lengths too, one by one and several in a call."""
    monkeypatch.setattr(transfers, "BATCH_PIECES", 7)
    num_bytes, address, draw = 12 * CHUNK - 5, memory.arena.data_ptr(), np.random.default_rng(1)
    values = draw.integers(0, 256, num_bytes, np.uint8)
    there, back = (torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=pinned).numpy() for _ in range(2))
    there[:] = values
    sizes = [1, 7, 8, 9, 16384, 16391, CHUNK // 4, CHUNK // 4 + 3, CHUNK, CHUNK + 5]
    places, at = list[tuple[int, int]](), 0  # what lies between two pieces stays zero
    while at < num_bytes:
        places.append((at, min(num_bytes, at + int(draw.choice(sizes)))))
        at = places[-1][1] + 8 - places[-1][1] % 8
    assert len(places) > 3 * 7
    out, home = ([(address + begin, host[begin:end]) for begin, end in places] for host in (there, back))
    wanted = [checksum.of(piece) for _, piece in out]
    memory.arena.zero_()
    torch.cuda.synchronize()  # copies to the device do not wait for it
    copy_in, copy_out = (copies_several(memory, out) if in_batches else None for out in (False, True))
    assert transfer(memory.copy_in, out, several=copy_in) == wanted
    assert transfer(memory.copy_out, home, several=copy_out) == wanted
    for (_, source), (_, copied) in zip(out, home, strict=True):
        assert np.array_equal(source, copied)
    assert memory.checksum(address, num_bytes) == checksum.of(back)


def test_copies_and_evictions_beside_a_capture(memory: CudaMemory) -> None:
    """One thread captures graph after graph, as idle time does, while another maps, fills, sums and unmaps weights."""
    stop, failed = threading.Event(), []

    def evict() -> None:
        try:
            held = WeightRange(memory, 3 * CHUNK)
            source = np.full(3 * CHUNK, 7, np.uint8)
            while not stop.is_set():
                held.map([1, 2, 3])
                assert memory.copy_in(held.address, source).wait() == checksum.of(source)
                held.unmap()
        except BaseException as error:
            failed.append(error)

    x, stream = torch.ones(64, 64, device="cuda"), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        (x @ x).sum()  # libraries set themselves up outside the capture
    torch.cuda.synchronize()
    other = threading.Thread(target=evict)
    other.start()
    try:
        for _ in range(50):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.stream(stream):
                graph.capture_begin(capture_error_mode="thread_local")
                product = x @ x
                graph.capture_end()
            graph.replay()
            assert float(product[0, 0]) == 64.0
    finally:
        stop.set()
        other.join(60)
    assert not failed


def test_torch_is_held_to_its_work_space() -> None:
    """What it asks for beyond is refused as that, and it goes on."""
    program = """
import torch
from engine.cuda.work_space import KEPT_BYTES, limit_torch
assert limit_torch(64 << 20) == KEPT_BYTES + (64 << 20)
try:
    torch.empty(KEPT_BYTES + (65 << 20), dtype=torch.uint8, device="cuda")
except torch.OutOfMemoryError as error:
    print("refused", str(error).splitlines()[0])
print("goes on", bool(torch.ones(KEPT_BYTES, dtype=torch.uint8, device="cuda")[-1] == 1))
"""
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "refused" in done.stdout
    assert "goes on True" in done.stdout
