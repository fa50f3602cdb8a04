"""With copies that a device makes by itself, nothing is reported, freed or reused before they are over."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton")

from engine.contracts.loads import LoadTask
from engine.cuda.backend import CudaBackend
from engine.cuda.sink import DeviceSink
from engine.loading.runner import TorchRunner
from engine.loading.weight_copies import WeightCopies
from engine.memory import mappings, transfers
from engine.memory.host_tier import HostTier
from engine.memory.transfers import NUM_THREADS, UNDER_WAY, Several, TransferCancelled, starts_several, transfer
from engine.memory.weight_arrivals import parameter_places
from engine.memory.weight_range import WeightRange
from engine.protocol import Configure, LoadModel
from loader.files.file_calls import ReadCancelled
from loader.formats.registry import stored_format
from loader.models.catalog import scan_one
from loader.packing import checksum
from loader.reading.landings import Places
from loader.reading.sinks import HostSink
from loader.reading.staging import StagingRing
from loader.reading.weight_stream import OpenCheckpoint, open_checkpoint, planned_reads, stream_weights
from loader.sizes import layout
from tests.engine.delayed_memory import DelayedMemory
from tests.engine.engine_process import load_message
from tests.engine.model_bench import BLOCK_TOKENS, CACHE_DIR, CASES, MAX_LEN, make_checkpoint
from tests.loader.gptq import awq, gptq, quantize

CHUNK = 64 << 10
NUM_SLOTS, SLOT_BYTES = 2, 8 << 10
NEVER: Callable[[], bool] = lambda: False  # noqa: E731


class Device:
    """A delayed memory with the range of one model and a ring of two slots, which is far smaller than the model."""

    def __init__(self, source: OpenCheckpoint, dtype: str, fail_at: int = 0) -> None:
        self.source, self.dtype, self.form = source, dtype, stored_format(source.shape)
        self.memory = DelayedMemory(64, CHUNK, fail_at)
        num_bytes = layout.weights_bytes(source.shape, dtype, self.form)
        self.weights = WeightRange(self.memory, num_bytes)
        self.weights.map(list(range(self.weights.num_chunks)))
        self.held = np.frombuffer(self.weights.buffer, np.uint8)
        self.ring = StagingRing(NUM_SLOTS, SLOT_BYTES)
        self.wanted = np.zeros(num_bytes, np.uint8)
        stream_weights(source, dtype, HostSink(self.wanted.data), StagingRing(), lambda done, total: None, NEVER, self.form)

    def stream(self, cancelled: Callable[[], bool] = NEVER, landed: Callable[[Places], None] = lambda places: None) -> None:
        sink = DeviceSink(self.memory, self.weights)
        stream_weights(self.source, self.dtype, sink, self.ring, lambda done, total: None, cancelled, self.form, landed)

    def check_slots_are_back(self) -> None:
        slots = [self.ring.take() for _ in range(NUM_SLOTS)]
        assert len({np.frombuffer(slot, np.uint8).ctypes.data for slot in slots}) == NUM_SLOTS
        assert self.ring._free.empty()

    def check_nothing_is_under_way(self) -> None:
        assert self.memory.num_over == self.memory.num_started


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("llama")
    make_checkpoint(made, **CASES["llama"])
    return made


@pytest.fixture
def device(folder: Path) -> Iterator[Callable[..., Device]]:
    with ExitStack() as stack:

        def make(dtype: str = "float32", **options: Any) -> Device:
            made = Device(open_checkpoint(folder, "", stack, in_place=False), dtype, **options)
            stack.callback(made.memory.close)
            return made

        yield make


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_has_landed_is_there(device: Callable[..., Device], dtype: str) -> None:
    """Reported bytes are in device memory, although slots are refilled while copies lag behind. Each read is reported once."""
    made = device(dtype)
    told: list[Places] = []

    def landed(places: Places) -> None:
        for begin, end in places:
            assert np.array_equal(made.held[begin:end], made.wanted[begin:end])
        told.append(places)

    made.stream(landed=landed)
    assert np.array_equal(made.held[: len(made.wanted)], made.wanted)
    reads = planned_reads(made.source, dtype, made.ring)
    assert len(reads) > 10 * NUM_SLOTS
    assert sorted(told) == sorted(read.places for read in reads)
    made.check_slots_are_back()
    made.check_nothing_is_under_way()


@pytest.mark.parametrize("config", [gptq(sym=False, desc_act=True), gptq(group_size=64), awq()])
def test_what_is_rearranged_lands_as_a_whole(tmp_path: Path, config: dict[str, Any]) -> None:
    """Tensors of several reads, on a device and on the host: the same bytes as of whole reads, and each is told once, when it no
    longer changes."""
    make_checkpoint(tmp_path / "plain", **CASES["llama"] | {"hidden_size": 192, "intermediate_size": 192, "num_hidden_layers": 1})
    quantize(tmp_path / "plain", tmp_path, config, plain="o_proj")
    with ExitStack() as stack:
        made = Device(open_checkpoint(tmp_path, "", stack, in_place=False), "float32")
        stack.callback(made.memory.close)
        on_host, lock = np.zeros_like(made.wanted), threading.Lock()
        reads = planned_reads(made.source, "float32", made.ring, made.form)
        assert sum(segment.tensor.name.endswith("up_proj.qweight") for read in reads for segment in read.segments) > 1
        for held in (made.held, on_host):
            told = 0

            def landed(places: Places, held: np.ndarray = held) -> None:
                nonlocal told
                with lock:
                    for begin, end in places:
                        assert np.array_equal(held[begin:end], made.wanted[begin:end])
                        told += end - begin

            if held is on_host:
                sink = HostSink(on_host.data)
                stream_weights(made.source, "float32", sink, made.ring, lambda done, total: None, NEVER, made.form, landed)
            else:
                made.stream(landed=landed)
            assert told == sum(slot.num_bytes for slot in layout.weight_layout(made.source.shape, "float32", made.form))
            assert np.array_equal(held[: len(made.wanted)], made.wanted)
        made.check_slots_are_back()
        made.check_nothing_is_under_way()


@pytest.mark.parametrize("fails", [False, True])
def test_weights_are_kept_from_the_device_as_they_land(device: Callable[..., Device], fails: bool) -> None:
    """Weights are copied to the host tier while others are still copied to the device. After a failure no copy is left under
    way."""
    made = device(fail_at=60 if fails else 0)
    fd = os.memfd_create("tier")
    os.ftruncate(fd, 32 * CHUNK)
    tier, slots = HostTier(fd, 32, CHUNK), list(range(5, 5 + made.weights.num_chunks))
    task = LoadTask(load_message("", keep_slots=slots), np.arange(1, dtype=np.int32), lambda done, total: None, NEVER)
    places = [(begin, end) for begin, end, _ in parameter_places(layout.weight_layout(made.source.shape, "float32"))]

    def load() -> None:
        with WeightCopies(made.memory, tier).keeping(task, made.weights, places) as kept:
            assert kept is not None

            def landed(places: Places) -> None:
                for begin, end in places:
                    kept.landed(begin, end)

            made.stream(landed=landed)

    if fails:
        with pytest.raises(RuntimeError, match="illegal memory access"):
            load()
        assert not task.kept
    else:
        load()
        assert task.kept
        assert b"".join(piece.tobytes() for piece in tier.pieces(slots, made.weights.num_bytes)) == made.held.tobytes()
        assert made.memory.most_under_way > 1
    made.check_slots_are_back()
    made.check_nothing_is_under_way()
    mappings.release(*tier.span)


def test_a_full_ring_waits_for_the_device(device: Callable[..., Device]) -> None:
    """While the device copies nothing, no more is read than there are slots, and nothing is reported."""
    made, told = device(), []
    made.memory.running.clear()
    load = threading.Thread(target=made.stream, kwargs={"landed": told.append})
    load.start()
    while not made.ring._free.empty():
        time.sleep(0.01)
    time.sleep(0.2)
    most = max(len(read.segments) for read in planned_reads(made.source, "float32", made.ring))
    assert 0 < made.memory.num_started <= NUM_SLOTS * most
    assert not told
    made.memory.running.set()
    load.join(30)
    assert not load.is_alive()
    assert np.array_equal(made.held[: len(made.wanted)], made.wanted)


@pytest.mark.parametrize("fail_at", [1, 3, 40])
def test_a_device_that_fails_fails_the_load(device: Callable[..., Device], fail_at: int) -> None:
    made, told = device(fail_at=fail_at), []
    with pytest.raises(RuntimeError, match="illegal memory access"):
        made.stream(landed=told.append)
    assert len(told) < fail_at
    made.check_slots_are_back()
    made.check_nothing_is_under_way()


def test_a_cancelled_load_leaves_no_copy_under_way(device: Callable[..., Device]) -> None:
    made, looks = device(), iter(range(100))
    with pytest.raises(ReadCancelled):
        made.stream(cancelled=lambda: next(looks) == 5)
    made.check_slots_are_back()
    made.check_nothing_is_under_way()


# ---- swaps


@pytest.fixture
def memory() -> Iterator[DelayedMemory]:
    made = DelayedMemory(16, CHUNK)
    yield made
    made.close()


def pieces_of(memory: DelayedMemory, host: np.ndarray) -> list[tuple[int, Any]]:
    address = memory.arena.data_ptr()
    return [(address + at, host[at : at + CHUNK]) for at in range(0, len(host), CHUNK)]


@pytest.fixture(params=["singly", "in batches"])
def several(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[DelayedMemory, bool], Several | None]:
    """What a transfer is given: nothing, or batches of three pieces, two under way at a time."""
    monkeypatch.setattr(transfers, "BATCH_PIECES", 3)
    monkeypatch.setattr(transfers, "BATCHES_UNDER_WAY", 2)
    return starts_several if request.param == "in batches" else lambda memory, out: None


def test_pieces_go_there_and_back(memory: DelayedMemory, several: Callable[[DelayedMemory, bool], Several | None]) -> None:
    """Pieces are copied to the device and back, several at a time. Progress grows, a reported piece has arrived, and the checksums
    are right."""
    host = np.random.default_rng(0).integers(0, 256, 16 * CHUNK, np.uint8)
    pieces, done, told = pieces_of(memory, host), [], []

    def landed(piece: tuple[int, Any]) -> None:
        at = piece[0] - memory.arena.data_ptr()
        assert np.array_equal(memory.arena.numpy()[at : at + CHUNK], piece[1])
        told.append(at)

    sums = transfer(memory.copy_in, pieces, progress=done.append, landed=landed, several=several(memory, False))
    assert sums == [checksum.of(piece) for _, piece in pieces]
    assert done == list(range(CHUNK, 16 * CHUNK + 1, CHUNK))
    assert sorted(told) == list(range(0, 16 * CHUNK, CHUNK))
    assert 1 < memory.most_under_way <= NUM_THREADS * UNDER_WAY
    back = np.zeros_like(host)
    assert transfer(memory.copy_out, pieces_of(memory, back), several=several(memory, True)) == sums
    assert np.array_equal(back, host)
    if memory.num_calls:
        assert memory.num_calls == 2 * 6
        assert memory.most_under_way > 3


def test_a_transfer_ends_with_its_copies(memory: DelayedMemory, several: Callable[[DelayedMemory, bool], Several | None]) -> None:
    """A transfer that is cancelled or fails returns only when no copy reads or writes the memory any more."""
    pieces = pieces_of(memory, np.ones(16 * CHUNK, np.uint8))
    looks = iter(range(100))
    with pytest.raises(TransferCancelled):
        transfer(memory.copy_in, pieces, cancelled=lambda: next(looks) >= 3, several=several(memory, False))
    assert memory.num_over == memory.num_started < 16
    broken = DelayedMemory(16, CHUNK, fail_at=4)
    told: list[Any] = []
    pieces = pieces_of(broken, np.ones(16 * CHUNK, np.uint8))
    with pytest.raises(RuntimeError, match="illegal memory access"):
        transfer(broken.copy_in, pieces, landed=told.append, several=several(broken, False))
    assert broken.num_over == broken.num_started < 16
    assert len(told) <= 3
    broken.close()


def test_a_call_takes_the_pieces_that_are_there(memory: DelayedMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A piece is copied and reported without waiting for more of its batch; those that come while the device is busy are copied in
    one call."""
    monkeypatch.setattr(transfers, "BATCHES_UNDER_WAY", 1)
    ready: SimpleQueue[int | None] = SimpleQueue()
    pieces, told = pieces_of(memory, np.ones(16 * CHUNK, np.uint8)), SimpleQueue[tuple[int, Any]]()
    arguments = {"landed": told.put, "next_piece": ready.get, "several": starts_several(memory, False)}
    copying = threading.Thread(target=transfer, args=(memory.copy_in, pieces), kwargs=arguments)
    copying.start()
    ready.put(7)
    assert told.get(timeout=30) is pieces[7]
    memory.running.clear()
    ready.put(3)
    while memory.num_started < 2:
        time.sleep(0.001)
    for at in (1, 0, 9):
        ready.put(at)
    memory.running.set()
    assert [told.get(timeout=30) for _ in range(4)] == [pieces[at] for at in (3, 1, 0, 9)]
    ready.put(None)
    copying.join(30)
    assert not copying.is_alive()
    assert memory.num_calls == 3


# ---- a whole load


@pytest.mark.parametrize("fail_at", [2, 30])  # the first copy has the checksum's kernel compiled
def test_a_load_that_failed_leaves_its_chunks_free(folder: Path, fail_at: int) -> None:
    """The runner raises the device's error for the load. Nothing is mapped or under way afterwards, so the chunks can be reused at
    once."""
    memory = DelayedMemory(64, CHUNK, fail_at)
    options = Configure("cuda:0", 64, CHUNK, 64 << 20, 512, BLOCK_TOKENS, 10.0, 1, cache_dir=CACHE_DIR)
    runner = TorchRunner(CudaBackend(memory, options), options)
    runner._ring = StagingRing(NUM_SLOTS, SLOT_BYTES)
    spec = LoadModel(1, "m", str(folder), "float32", scan_one(folder).fingerprint, 1 << 20, 0, 0, MAX_LEN, 8, [1])
    chunks = np.arange(40, dtype=np.int32)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        runner.load(LoadTask(spec, chunks, lambda done, total: None, lambda: False))
    assert memory.num_over == memory.num_started >= fail_at
    weights = runner._ranges.of("m", (spec.fingerprint, "float32", ""), runner._ranges._ranges["m"][1].num_bytes)
    weights.map(chunks[: weights.num_chunks].tolist())  # would be refused if it were still mapped
    weights.close()
    memory.close()
