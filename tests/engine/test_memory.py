"""Tests of chunks, the arena and weight ranges: one suite for every kind of device memory (tests/gpu runs it on CUDA)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from engine.cpu.memory import CpuMemory
from engine.host import checksum
from engine.memory import mappings, preparing
from engine.memory.arena import kv_views
from engine.memory.chunk_memory import ChunkMemory
from engine.memory.host_tier import HostTier
from engine.memory.preparing import AFTER_IDLE_S, Preparer
from engine.memory.transfers import copies_several
from engine.memory.weight_range import WeightRange, WeightRanges
from loader.packing import checksum as sums
from loader.shapes.kv_layout import KVGroupSpec
from scheduler.batch.chunk_pool import ChunkPool

CHUNK = 2 << 20


class MemorySuite:
    """Tests that every ChunkMemory of 12 chunks of 2 MiB must pass."""

    def test_two_groups_see_the_same_bytes(self, memory: ChunkMemory) -> None:
        small, scales = kv_views(memory.arena, KVGroupSpec("full", 4, 512, (0, 1)), (2, 1, 8), "float32")
        assert scales is None
        assert small.shape == (12 * CHUNK // 512, 2, 2, 1, 4, 8)
        small[3] = 7.0
        assert (memory.arena[3 * 512 : 4 * 512].view(torch.float32) == 7.0).all()
        odd, _ = kv_views(memory.arena, KVGroupSpec("full", 4, 6000, (0, 1, 2)), (2, 1, 125), "bfloat16")
        assert len(odd) == 12 * CHUNK // 6000, "the last partial block is left out"

    def test_a_range_shows_its_chunks_in_order(self, memory: ChunkMemory) -> None:
        """What is written through the arena is read through the weight range, and the other way round."""
        held = WeightRange(memory, 4 * CHUNK - 5000)
        chunks = [7, 2, 3, 11]
        held.map(chunks)
        for place, chunk in enumerate(chunks):
            memory.arena[chunk * CHUNK : chunk * CHUNK + 100] = place + 1
            assert (held.tensor(place * CHUNK, (100,), torch.uint8) == place + 1).all()
        held.tensor(CHUNK - 512, (256,), torch.float32).fill_(3.0)  # across the border between two chunks
        assert (memory.arena[8 * CHUNK - 512 : 8 * CHUNK].view(torch.float32) == 3.0).all()
        assert (memory.arena[2 * CHUNK : 2 * CHUNK + 512].view(torch.float32) == 3.0).all()
        held.close()

    def test_addresses_are_for_life(self, memory: ChunkMemory) -> None:
        ranges = WeightRanges(memory)
        first = ranges.of("m", ("print", "bfloat16"), 3 * CHUNK)
        first.map([0, 1, 2])
        tensor = first.tensor(4096, (1000,), torch.float32)
        tensor.fill_(1.0)
        first.unmap()
        first.unmap()
        other = ranges.of("n", ("print", "bfloat16"), 5 * CHUNK)
        other.map([0, 1, 2, 3, 4])
        again = ranges.of("m", ("print", "bfloat16"), 3 * CHUNK)
        assert again.address == first.address
        again.map([9, 8, 7])
        tensor.fill_(2.0)  # this view was made before the eviction
        assert (memory.arena[9 * CHUNK + 4096 : 9 * CHUNK + 8096].view(torch.float32) == 2.0).all()
        again.unmap()
        other.unmap()
        changed = ranges.of("m", ("other print", "bfloat16"), 3 * CHUNK)
        assert changed is not again

    def test_the_wrong_number_of_chunks(self, memory: ChunkMemory) -> None:
        held = WeightRange(memory, 3 * CHUNK)
        with pytest.raises(ValueError, match="2 chunks for a range of 3"):
            held.map([0, 1])
        held.map([0, 1, 2])
        with pytest.raises(ValueError, match="mapped already"):
            held.map([0, 1, 2])
        held.close()
        with pytest.raises(IndexError, match="12"):
            memory.map(0, [12])

    def test_a_range_without_bytes_is_never_unmapped(self, memory: ChunkMemory) -> None:
        empty, held = WeightRange(memory, 0), WeightRange(memory, CHUNK)
        empty.map([])
        empty.close()
        held.map([3])
        held.close()

    def test_copies_in_and_out_are_checked(self, memory: ChunkMemory) -> None:
        held = WeightRange(memory, 2 * CHUNK)
        held.map([5, 1])
        source = np.random.default_rng(0).integers(0, 256, CHUNK + 77, np.uint8)
        told = memory.copy_in(held.address + 1000, source).wait()
        target = np.zeros_like(source)
        assert memory.copy_out(held.address + 1000, target).wait() == told
        assert (target == source).all()
        source[12345] ^= 4
        assert memory.copy_in(held.address + 1000, source).wait() != told
        held.close()

    def test_several_pieces_are_copied_as_one_by_one(self, memory: ChunkMemory) -> None:
        """Pieces copied in one call have the same content and checksums as pieces copied singly, even if one is not a whole number
        of words."""
        copy_in, copy_out = (copies_several(memory, out) for out in (False, True))
        assert copy_in is not None
        assert copy_out is not None
        held = WeightRange(memory, 2 * CHUNK)
        held.map([5, 1])
        host = np.random.default_rng(0).integers(0, 256, CHUNK, np.uint8)
        for sizes in ((4096, 8, 20_000), (4096, 77, 800)):
            ends = [at + size for at, size in zip((0, 8192, 16384), sizes, strict=True)]
            pieces = [(held.address + 64 + end - size, host[end - size : end]) for size, end in zip(sizes, ends, strict=True)]
            told = copy_in.start(pieces).wait()
            assert told == [checksum.of(piece) for _, piece in pieces]
            back = [(address, np.zeros_like(piece)) for address, piece in pieces]
            assert copy_out.start(back).wait() == told
            for (_, piece), (_, copied) in zip(pieces, back, strict=True):
                assert (piece == copied).all()
        held.close()

    def test_pieces_of_the_arena_are_copied(self, memory: ChunkMemory) -> None:
        whole = memory.arena[: len(memory.arena) // 6000 * 6000]
        pieces = whole.view(torch.float32).view(-1, 1500)  # pieces of 6000 bytes, which is no divisor of the chunk's size
        for number in range(5):
            pieces[number] = float(number)
        sources, targets = np.array([0, 3, 4], np.int32), np.array([len(pieces) - 1, 7, 1000], np.int32)
        memory.copy_within(6000, sources, targets)
        assert [int(pieces[at].sum()) for at in targets.tolist()] == [0, 4500, 6000]
        assert [int(pieces[at].sum()) for at in range(5)] == [0, 1500, 3000, 4500, 6000]

    def test_preparing_harms_nothing(self, memory: ChunkMemory) -> None:
        memory.arena[:CHUNK] = 5
        for chunk in range(1, 12):
            assert 0 <= memory.prepare(chunk) <= CHUNK
        assert (memory.arena[:CHUNK] == 5).all()
        memory.discard(3, 4)
        memory.arena[3 * CHUNK : 7 * CHUNK] = 9
        with pytest.raises(IndexError, match=r"chunks 11\.\.13"):
            memory.discard(11, 2)


@pytest.fixture
def memory() -> Iterator[CpuMemory]:
    made = CpuMemory(12, CHUNK)
    yield made
    made.close()


class TestCpuMemory(MemorySuite):
    def test_a_range_that_is_refused_can_be_mapped_later(self, memory: CpuMemory, monkeypatch: pytest.MonkeyPatch) -> None:
        held, real, calls = WeightRange(memory, 3 * CHUNK), mappings.map_file, []

        def map_file(address: int, *rest: int) -> None:
            calls.append(address)
            if len(calls) == 2:
                raise MemoryError("can't map")
            real(address, *rest)

        with monkeypatch.context() as patch:
            patch.setattr(mappings, "map_file", map_file)
            with pytest.raises(MemoryError, match="can't map"):
                held.map([5, 7, 9])
        assert calls == [held.address, held.address + CHUNK]
        ranges = [
            line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines() if "hearthd-chunks" in line
        ]
        assert not any(int(begin, 16) <= held.address < int(end, 16) for begin, end in ranges)
        held.unmap()
        held.map([5, 7, 9])
        held.tensor(0, (8,), torch.uint8).fill_(3)
        assert (memory.arena[5 * CHUNK : 5 * CHUNK + 8] == 3).all()
        held.close()


def shared_bytes() -> int:
    return int(psutil.Process().memory_info().shared)


def page_table_bytes() -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmPTE"))
    return int(line.split()[1]) << 10


def test_an_evicted_model_leaves_next_to_nothing(memory: CpuMemory) -> None:
    """After an eviction the chunks belong to the pool again. What stays mapped for the model is address space without pages or page
    tables."""
    held = WeightRange(memory, 12 * CHUNK)
    tensor = held.tensor(0, (12 * CHUNK,), torch.uint8)
    before, tables = shared_bytes(), page_table_bytes()
    held.map(range(12))
    tensor.fill_(1)
    assert shared_bytes() - before >= 12 * CHUNK
    held.unmap()
    assert shared_bytes() - before <= 1 << 20
    assert page_table_bytes() - tables <= 64 << 10
    held.close()


def test_memory_comes_with_use_and_goes_with_discard(memory: CpuMemory) -> None:
    before = shared_bytes()
    memory.arena[: 10 * CHUNK].fill_(1)
    assert shared_bytes() - before >= 10 * CHUNK
    memory.discard(4, 6)
    assert shared_bytes() - before <= 4 * CHUNK + (1 << 20)
    assert memory.arena[4 * CHUNK].item() == 0
    assert memory.arena[4 * CHUNK - 1].item() == 1


def test_a_part_of_a_range_is_prepared_and_keeps_its_content(memory: CpuMemory) -> None:
    weights = WeightRange(memory, 3 * CHUNK)
    weights.map([9, 2, 4])
    memory.arena[4 * CHUNK : 5 * CHUNK] = 7
    before = shared_bytes()
    weights.prepare(CHUNK + 5, 2 * CHUNK + 5)
    memory.arena[2 * CHUNK :: 4096][:8].sum()  # has its pages already
    assert CHUNK <= shared_bytes() - before < 2 * CHUNK
    assert (memory.arena[4 * CHUNK : 5 * CHUNK] == 7).all()
    weights.close()


@pytest.mark.parametrize("allowed", [True, False])
def test_what_a_chunk_has_is_not_asked_for_again(memory: CpuMemory, monkeypatch: pytest.MonkeyPatch, allowed: bool) -> None:
    """Preparing a chunk again asks only for what it lacks. allowed: whether the system grants huge pages. If it does not, they are
    requested at every attempt, normal pages only once."""
    calls: list[str] = []

    def collapse(address: int, num_bytes: int) -> int:
        calls.append("collapse")
        return num_bytes if allowed else 0

    def populate(address: int, num_bytes: int) -> bool:
        calls.append("populate")
        return True

    monkeypatch.setattr(mappings, "collapse", collapse)
    monkeypatch.setattr(mappings, "populate", populate)
    first, again = (["collapse"], []) if allowed else (["collapse", "populate"], ["collapse"])
    for wanted in (first, again, again):
        calls.clear()
        assert memory.prepare(5) == (CHUNK if allowed else 0)
        assert calls == wanted
    memory.discard(5, 1)
    calls.clear()
    memory.prepare(5)
    assert calls == first


def test_chunks_are_whole_pages() -> None:
    with pytest.raises(ValueError, match="chunk_bytes 1000"):
        CpuMemory(2, 1000)


@pytest.mark.parametrize("refused", ["memfd_create", "dup", "ftruncate", "map_file"])
def test_memory_that_is_refused_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch, refused: str) -> None:
    other = CpuMemory(3, CHUNK)
    handles = other.export() if refused == "dup" else []
    where, error = (mappings, MemoryError("no")) if refused == "map_file" else (os, OSError(24, "no"))
    reserved: list[int] = []

    def reserve(num_bytes: int, make: Callable[[int], int] = mappings.reserve) -> int:
        reserved.append(make(num_bytes))
        return reserved[-1]

    def refuse(*_: object) -> None:
        raise error

    num_open = psutil.Process().num_fds()
    monkeypatch.setattr(mappings, "reserve", reserve)
    monkeypatch.setattr(where, refused, refuse)
    with pytest.raises(MemoryError, match=f"can't make {3 * CHUNK} bytes of shared memory: no"):
        CpuMemory(3, CHUNK, handles)
    monkeypatch.undo()
    assert psutil.Process().num_fds() == num_open
    ranges = [line.split()[0] for line in Path("/proc/self/maps").read_text().splitlines()]
    ends = [[int(end, 16) for end in each.split("-")] for each in ranges]
    assert not any(begin <= reserved[0] < end for begin, end in ends)
    for handle in handles:
        os.close(handle)
    other.close()


def test_address_space_that_is_not_there(memory: CpuMemory) -> None:
    with pytest.raises(MemoryError, match="can't reserve"):
        WeightRange(memory, 1 << 60)


@pytest.mark.parametrize("when", ["before the first load", "after an eviction"])
def test_touching_weights_that_are_not_loaded_is_a_segmentation_fault(when: str) -> None:
    program = f"""
import torch
from engine.cpu.memory import CpuMemory
from engine.memory.host_tier import HostTier
from engine.memory.preparing import AFTER_IDLE_S, Preparer
from engine.memory.weight_range import WeightRange
memory = CpuMemory(4, 1 << 16)
weights = WeightRange(memory, 1 << 17)
tensor = weights.tensor(0, (1000,), torch.float32)
if {when == "after an eviction"}:
    weights.map([1, 3])
    tensor.fill_(1.0)
    weights.unmap()
print("mapped and unmapped", flush=True)
tensor.sum()
"""
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, timeout=60, check=False)
    assert b"mapped and unmapped" in done.stdout, done.stderr.decode()
    assert done.returncode == -signal.SIGSEGV, done.stderr.decode()


@pytest.mark.parametrize("num_bytes", [0, 1, 8, 1001, 300_001])
def test_the_checksum_and_its_twin(num_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    source = np.random.default_rng(1).integers(0, 256, num_bytes, np.uint8)
    target, second = np.zeros_like(source), np.zeros_like(source)
    told = checksum.copy(target, source)
    monkeypatch.setattr(checksum, "_kernels", lambda: None)
    assert checksum.copy(second, source) == told
    assert sums.of(source) == told
    assert (target == source).all()
    assert (second == source).all()
    assert (second == source).all()
    if num_bytes > 16:
        source[[0, 8]] = source[[8, 0]] + 1
        assert checksum.copy(target, source) != told


class Recording:
    """A stand-in for memory and host tier that only records what is prepared."""

    chunk_bytes = slot_bytes = CHUNK
    num_slots = 3

    def __init__(self) -> None:
        self.prepared: list[int] = []

    def prepare(self, chunk: int) -> int:
        self.prepared.append(chunk)
        return CHUNK // 2


def test_free_memory_is_prepared_within_the_limit(caplog: pytest.LogCaptureFixture) -> None:
    chunks = ChunkPool(10, CHUNK, resident_limit=6)
    chunks.take_weights(2)
    memory, tier = Recording(), Recording()
    preparer = Preparer(memory, chunks, tier)  # type: ignore[arg-type]
    assert preparer.wait_s() == AFTER_IDLE_S
    caplog.set_level("INFO")
    while preparer.wait_s() is not None:
        preparer.step()
    assert len(memory.prepared) == 4, "two of the six are in use"
    assert chunks.free[memory.prepared].all()
    assert tier.prepared == [0, 1, 2]
    assert "prepared 14 MiB of memory, 7 MiB of it in huge pages" in caplog.text
    assert chunks.take_discards() == []
    weights = chunks.take_weights(3)
    assert set(weights.tolist()) <= set(memory.prepared), "what is prepared is used first"
    chunks.give_back_weights(weights)
    assert preparer.wait_s() is None, "it still is"


def test_it_stops_when_the_system_has_little_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparing, "_LOOK_EVERY_BYTES", 3 * CHUNK)
    monkeypatch.setattr(preparing, "_available", lambda: 0.1)
    preparer = Preparer(Recording(), ChunkPool(10, CHUNK), None)  # type: ignore[arg-type]
    while preparer.wait_s() is not None:
        preparer.step()
    assert preparer.prepared_bytes == 3 * CHUNK


def test_preparing_leaves_what_a_slot_holds() -> None:
    fd = os.memfd_create("tier")
    os.ftruncate(fd, 2 * CHUNK)
    tier = HostTier(fd, 2, CHUNK)
    tier.slot(1)[:] = 7
    for slot in (0, 1):
        assert 0 <= tier.prepare(slot) <= CHUNK
    assert (tier.slot(1) == 7).all()
    assert (tier.slot(0) == 0).all()
