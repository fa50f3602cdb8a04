"""Tests of copying weights to the host tier while they are read."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest

from engine.contracts.loads import LoadCancelled, LoadTask
from engine.cpu.memory import CpuMemory
from engine.loading.weight_copies import WeightCopies
from engine.memory import transfers
from engine.memory.chunk_memory import EndedCopy
from engine.memory.host_tier import HostTier
from engine.memory.weight_arrivals import WeightArrivals
from engine.memory.weight_range import WeightRange
from engine.protocol import Evicted, EvictModel, LoadDone, LoadFailed
from loader.errors import ReadFailed
from loader.packing import checksum
from loader.reading import weight_stream
from loader.reading.file_reader import Fetched, Fetching, FileReader
from loader.reading.range_plan import Read
from tests.engine.engine_process import load_message
from tests.engine.model_bench import CASES
from tests.engine.tier_bench import CHUNK_BYTES, NUM_SLOTS, TierBench, make_models

CHUNK, CHUNKS = 8192, 6
NUM_BYTES = CHUNKS * CHUNK - 500
SLOTS = [3, 1, 7, 0, 5, 2]
GAP = (2 * CHUNK - 64, 4 * CHUNK + 64)  # no read fills it, and the third piece lies inside it


class Bench:
    """A weight range of six chunks filled with noise, and a host tier of eight slots."""

    def __init__(self) -> None:
        self.memory = CpuMemory(CHUNKS, CHUNK)
        self.fd = os.memfd_create("tier")
        os.ftruncate(self.fd, 8 * CHUNK)
        self.tier = HostTier(os.dup(self.fd), 8, CHUNK)
        self.weights = WeightRange(self.memory, NUM_BYTES)
        self.weights.map(range(CHUNKS))
        self.held = np.frombuffer(self.weights.buffer, np.uint8)
        self.held[:] = np.random.default_rng(4).integers(0, 256, NUM_BYTES, np.uint8)
        self.copies = WeightCopies(self.memory, self.tier)
        self.cancelled = False
        chunks = np.arange(CHUNKS, dtype=np.int32)
        message = load_message("/nowhere", "m", keep_slots=SLOTS)
        self.task = LoadTask(message, chunks, lambda done, total: None, lambda: self.cancelled)

    def in_tier(self) -> bytes:
        return b"".join(piece.tobytes() for piece in self.tier.pieces(SLOTS, NUM_BYTES))


@pytest.fixture
def bench() -> Bench:
    return Bench()


def keepers() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name in ("keep weights", "transfer")]


def waits(until: Callable[[], bool]) -> None:
    reached = threading.Event()
    for _ in range(3000):
        if until():
            return
        reached.wait(0.01)
    raise AssertionError("it never came to that")


def test_arrivals_tell_of_a_group_once_when_its_last_byte_lands() -> None:
    arrivals = WeightArrivals([(0, 8, 0), (64, 72, 1), (100, 110, 0), (72, 80, 1), (200, 200, 2)], 4)
    assert arrivals.left_bytes == [18, 16, 0, 0]
    assert arrivals.landed(4, 75) == []
    assert arrivals.landed(0, 4) == []
    assert arrivals.left_bytes == [10, 5, 0, 0]
    assert arrivals.landed(75, 300) == [1, 0]
    assert arrivals.landed(300, 400) == []
    arrivals.begin_anew()
    assert arrivals.left_bytes == [18, 16, 0, 0]


@pytest.mark.parametrize("seed", range(4))
def test_what_lands_in_any_order_is_kept_whole(bench: Bench, seed: int) -> None:
    """The copy is complete when several threads report parts with arbitrary ends in any order. It includes the gap that no read
    fills."""
    draw = np.random.default_rng(seed)
    places = [(0, GAP[0]), (GAP[1], NUM_BYTES)]
    cuts = sorted(
        {0, GAP[0], GAP[1], NUM_BYTES, *draw.integers(1, GAP[0], 9).tolist(), *draw.integers(GAP[1], NUM_BYTES, 9).tolist()}
    )
    parts = [(begin, end) for begin, end in itertools.pairwise(cuts) if (begin, end) != GAP]
    draw.shuffle(parts)
    with bench.copies.keeping(bench.task, bench.weights, places) as kept:
        assert kept is not None
        threads = [threading.Thread(target=lambda own=parts[n::3]: [kept.landed(*part) for part in own]) for n in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert bench.in_tier() == bench.held.tobytes()
    pieces = [bench.held[at : at + CHUNK] for at in range(0, NUM_BYTES, CHUNK)]
    assert (bench.task.kept, bench.task.checksum) == (True, checksum.combined([checksum.of(piece) for piece in pieces]))
    assert not keepers()


def test_pieces_are_kept_before_the_rest_has_landed(bench: Bench) -> None:
    with bench.copies.keeping(bench.task, bench.weights, [(0, NUM_BYTES)]) as kept:
        assert kept is not None
        kept.landed(CHUNK // 2, 2 * CHUNK)
        waits(lambda: bench.in_tier()[CHUNK : 2 * CHUNK] == bench.held[CHUNK : 2 * CHUNK].tobytes())
        assert not any(bench.in_tier()[:CHUNK]), "half of it may be anything yet"
        kept.landed(0, CHUNK // 2)
        kept.landed(2 * CHUNK, NUM_BYTES)
    assert bench.in_tier() == bench.held.tobytes()


def test_weights_that_come_once_more_are_kept_as_they_came_last(bench: Bench) -> None:
    with bench.copies.keeping(bench.task, bench.weights, [(0, NUM_BYTES)]) as kept:
        assert kept is not None
        kept.landed(0, 3 * CHUNK + 100)
        kept.begin_anew()
        assert not keepers() or keepers().count("keep weights") == 1
        bench.held[:] ^= 0xFF
        kept.landed(0, NUM_BYTES)
    assert bench.in_tier() == bench.held.tobytes()
    assert bench.task.kept


def test_a_copy_that_lacks_memory_is_not_kept_and_fails_no_load(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    """Checksums of copies from a GPU take page-locked memory."""

    def copy_out(address: int, target: Any) -> EndedCopy:
        raise RuntimeError("CUDA error: out of memory\nat some call")

    bench.memory.copy_out = copy_out  # type: ignore[method-assign]
    with bench.copies.keeping(bench.task, bench.weights, [(0, NUM_BYTES)]) as kept:
        assert kept is not None
        kept.landed(0, NUM_BYTES)
    assert (bench.task.kept, bench.task.checksum) == (False, 0)
    assert caplog.messages == ["the weights of m are not kept in the host tier: CUDA error: out of memory"]
    assert not keepers()


def test_any_other_error_of_a_copy_fails_the_load(bench: Bench) -> None:
    def copy_out(address: int, target: Any) -> EndedCopy:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def read() -> None:
        with bench.copies.keeping(bench.task, bench.weights, [(0, NUM_BYTES)]) as kept:
            assert kept is not None
            kept.landed(0, NUM_BYTES)

    bench.memory.copy_out = copy_out  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="illegal"):
        read()


@pytest.mark.parametrize("landed", [0, 2 * CHUNK, NUM_BYTES])
def test_a_read_that_fails_keeps_nothing_and_writes_no_more(bench: Bench, landed: int) -> None:
    def read() -> None:
        with bench.copies.keeping(bench.task, bench.weights, [(0, NUM_BYTES)]) as kept:
            assert kept is not None
            kept.landed(0, landed)
            raise ReadFailed("model.safetensors", "w", "bad sector")

    with pytest.raises(ReadFailed):
        read()
    assert not keepers()
    assert (bench.task.kept, bench.task.checksum) == (False, 0)


def test_a_cancelled_load_does_not_wait_for_its_copy(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    may_copy = threading.Event()
    copied: list[int] = []

    def copy_out(address: int, target: object) -> EndedCopy:
        assert may_copy.wait(60)
        copied.append(address)
        return EndedCopy(0)

    monkeypatch.setattr(bench.memory, "copy_out", copy_out)

    def read() -> None:
        with bench.copies.keeping(bench.task, bench.weights, [(0, NUM_BYTES)]) as kept:
            assert kept is not None
            kept.landed(0, NUM_BYTES)
            bench.cancelled = True
            may_copy.set()

    with pytest.raises(LoadCancelled, match="copy of m to the host tier was cancelled"):
        read()
    assert len(copied) <= transfers.NUM_THREADS
    assert not bench.task.kept
    assert not keepers()


def test_a_device_that_fails_to_copy_fails_the_load(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def copy_out(address: int, target: object) -> EndedCopy:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(bench.memory, "copy_out", copy_out)

    def read() -> None:
        with bench.copies.keeping(bench.task, bench.weights, [(0, NUM_BYTES)]) as kept:
            assert kept is not None
            for piece in range(CHUNKS):
                kept.landed(piece * CHUNK, (piece + 1) * CHUNK)

    with pytest.raises(RuntimeError, match="illegal memory access"):
        read()
    assert not bench.task.kept
    assert not keepers()


def test_slots_that_can_t_hold_it(bench: Bench) -> None:
    bench.task.spec = load_message("/nowhere", "m", keep_slots=[1, 2])
    with pytest.raises(ValueError, match="2 slots of 8192 bytes are too few"), bench.copies.keeping(bench.task, bench.weights, []):
        pass
    without = WeightCopies(bench.memory, None)
    with pytest.raises(ValueError, match="no host tier"), without.keeping(bench.task, bench.weights, []):
        pass
    bench.task.spec = load_message("/nowhere", "m")
    with without.keeping(bench.task, bench.weights, []) as kept:
        assert kept is None


# ---- real loads


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("models")
    make_models(made, llama=CASES["llama"])
    return made


@pytest.fixture
def small_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes a load use a dozen reads in place of one."""
    plan = weight_stream.plan_reads
    monkeypatch.setattr(weight_stream, "plan_reads", lambda *args: plan(*args[:3], 16 << 10))


@pytest.mark.usefixtures("small_reads")
def test_the_tier_fills_while_the_file_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the last read ends, every slot is filled except those that this read contributes to."""
    bench = TierBench(folder)
    slots = list(range(20, 32))
    plan, fetch = weight_stream.planned_reads, FileReader.fetch
    reads: list[Read] = []
    ended = SimpleQueue[Read]()

    def planned(*args: Any) -> list[Read]:
        reads[:] = plan(*args)
        return reads

    def fetch_last_behind_the_copy(reader: FileReader, read: Read, at: Fetching, *how: Any) -> Fetched:
        if read is reads[-1]:
            waits(lambda: ended.qsize() == len(reads) - 1)
            places = [place for each in reads for place in each.places]
            num_pieces = -(-max(end for _, end in places) // CHUNK_BYTES)
            missing = {piece for begin, end in read.places for piece in range(begin // CHUNK_BYTES, -(-end // CHUNK_BYTES))}
            others = [slots[piece] for piece in range(num_pieces) if piece not in missing]
            assert len(others) > num_pieces / 2
            waits(lambda: all(bench.tier.slot(slot).any() for slot in others))
        fetched = fetch(reader, read, at, *how)
        ended.put(read)
        return fetched

    monkeypatch.setattr(weight_stream, "planned_reads", planned)
    monkeypatch.setattr(FileReader, "fetch", fetch_last_behind_the_copy)
    done = bench.load("llama", keep_slots=slots)
    assert len(reads) > 8
    assert done.kept
    monkeypatch.undo()
    bench.evict("llama")
    assert bench.load("llama", source_slots=slots, checksum=done.checksums[0]).bytes_read == 0


@pytest.mark.usefixtures("small_reads")
@pytest.mark.parametrize("cancel", [True, False])
def test_a_load_that_ends_half_way_leaves_the_slots_to_others(folder: Path, monkeypatch: pytest.MonkeyPatch, cancel: bool) -> None:
    bench = TierBench(folder)
    fetch, lock, begun = FileReader.fetch, threading.Lock(), [0]

    def stopped(reader: FileReader, read: Read, at: Fetching, *how: Any) -> Fetched:
        with lock:
            begun[0] += 1
            if begun[0] == 6:
                if not cancel:
                    raise ReadFailed("model.safetensors", "w", "bad sector")
                waits(bench.lifecycle.lives["llama"].load.cancelled.is_set)
        return fetch(reader, read, at, *how)

    monkeypatch.setattr(FileReader, "fetch", stopped)
    bench.lifecycle.load(bench.spec("llama", keep_slots=list(range(12))))
    if cancel:
        bench.lifecycle.evict(EvictModel(3, "llama", 64))
        assert bench.pump(Evicted).placement_id == 3
    else:
        assert "bad sector" in bench.pump(LoadFailed).error
    assert not keepers()
    before = [bench.tier.slot(slot).tobytes() for slot in range(NUM_SLOTS)]
    monkeypatch.undo()
    done: LoadDone = bench.load("llama")
    assert not done.kept
    assert before == [bench.tier.slot(slot).tobytes() for slot in range(NUM_SLOTS)]
