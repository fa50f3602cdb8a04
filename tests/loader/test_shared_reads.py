"""Reads that the ranks of a split model share: each byte is read once, and no rank depends on another one."""

from __future__ import annotations

import mmap
import re
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
from safetensors.torch import load_file

from engine.host import unpack_kernels
from loader.errors import ReadFailed
from loader.files import frame
from loader.formats.registry import held_format
from loader.reading import file_reader, range_plan, read_order
from loader.reading.file_reader import FileReader
from loader.reading.range_plan import Read
from loader.reading.read_order import ReadOrder, Turn
from loader.reading.shared_reads import Offer, SharedReads, leave, shared_by
from loader.reading.shared_slots import NUM_SLOTS, shared_reads_bytes, stage_reads_bytes
from loader.reading.sinks import HostSink
from loader.reading.staging import StagingRing
from loader.reading.unpack import Decoder
from loader.reading.weight_stream import open_checkpoint, planned_reads, stream_weights
from loader.shapes.model_shape import DeviceShare, Division
from loader.sizes.layout import weights_bytes
from tests.loader import test_packed_shares as packed
from tests.loader import test_split_formats as formats
from tests.loader.checkpoints import CONFIG, write_checkpoint, write_packable

SLOT_BYTES = 64 << 10
MIXTURE = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "norm_topk_prob": True, "num_experts": 4}
MIXTURE |= {"num_experts_per_tok": 2, "moe_intermediate_size": 256, "attention_bias": False}


STACKED = {"architectures": ["Llama4ForCausalLM"], "num_local_experts": 4, "num_experts_per_tok": 1, "attention_bias": False}
STACKED |= {"intermediate_size": 256, "intermediate_size_mlp": 512, "num_hidden_layers": 2, "interleave_moe_layer_step": 2}
LATENTS = CONFIG | formats.SIZES | {"architectures": ["DeepseekV3ForCausalLM"], "q_lora_rank": 32, "kv_lora_rank": 64}
LATENTS |= {"qk_nope_head_dim": 32, "qk_rope_head_dim": 8, "v_head_dim": 32}
LATENTS |= {"first_k_dense_replace": 1, "moe_intermediate_size": 32}


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine may hold up a rank for long."""
    monkeypatch.setattr(read_order, "PATIENCE_S", 60.0)


def shared_memory(size: int, slot_bytes: int = SLOT_BYTES) -> npt.NDArray[np.uint8]:
    return np.zeros(shared_reads_bytes(size, slot_bytes), np.uint8)


class Loaded(NamedTuple):
    """memory: the share's weight range. reads: those that were planned. read_bytes, given_bytes: as in ReadReport."""

    memory: bytes
    reads: list[Read]
    read_bytes: int
    given_bytes: int


class Loading(NamedTuple):
    """How a checkpoint is loaded. on_device: whether the weight range is no memory of the host."""

    folder: Path
    division: Division
    dtype: str = "bfloat16"
    quantize: str | None = None
    on_device: bool = False

    def share(self, rank: int, shared: Sequence[SharedReads] = ()) -> Loaded:
        """Loads the share of a rank, and leaves `shared`."""
        with ExitStack() as stack:
            if shared:
                stack.callback(leave, shared)
            source = open_checkpoint(self.folder, "", stack, share=DeviceShare(rank, self.division))
            source.shape = replace(source.shape, block_offsets=())
            held_in = held_format(source.shape, self.quantize)
            memory, ring = mmap.mmap(-1, weights_bytes(source.shape, self.dtype, held_in)), StagingRing(3, SLOT_BYTES)
            sink = DeviceSink(memoryview(memory)) if self.on_device else HostSink(memoryview(memory))
            told: tuple[Any, Any] = (lambda *_: None, lambda: False)
            decoder = Decoder("numba", unpack_kernels.decode, unpack_kernels.sum_of)
            report = stream_weights(source, self.dtype, sink, ring, *told, held_in, decoder=decoder, shared=shared)
            reads = planned_reads(source, self.dtype, ring, held_in, bool(shared))
            return Loaded(memory[:], reads, report.num_bytes, report.given_bytes)

    def together(self, but: Sequence[int] = ()) -> list[Loaded]:
        """Loads the shares of all ranks but some at the same time."""
        size, parts = self.division.stage_size, self.division.expert_parts
        num_bytes = stage_reads_bytes(size, parts, SLOT_BYTES)
        memories = [np.zeros(num_bytes, np.uint8) for _ in range(self.division.num_stages)]
        ranks = [rank for rank in range(self.division.size) if rank not in but]

        def load(rank: int) -> Loaded:
            return self.share(rank, shared_by(memories[self.division.stage_of(rank)], rank % size, size, parts, SLOT_BYTES))

        with ThreadPoolExecutor(self.division.size) as pool:
            return list(pool.map(load, ranks))

    def check(self) -> list[Loaded]:
        """Checks that ranks that load together hold what they hold if each loads alone, and that they read each byte once that all
        of them need."""
        loaded = self.together()
        for rank, share in enumerate(loaded):
            alone = self.share(rank)
            assert share.memory == alone.memory, rank
            assert share.read_bytes + share.given_bytes == alone.read_bytes
        for stage in range(self.division.num_stages):
            of_stage = [share for rank, share in enumerate(loaded) if self.division.stage_of(rank) == stage]
            same = [[read for read in share.reads if read.num_readers > 1] for share in of_stage]
            readers = Counter((read.file, read.begin, read.end) for reads in same for read in reads)
            assert all(readers[read.file, read.begin, read.end] % read.num_readers == 0 for reads in same for read in reads)
            once = sum(read.num_bytes * (read.num_readers - 1) / read.num_readers for reads in same for read in reads)
            assert sum(share.given_bytes for share in of_stage) == round(once)
        return loaded


class DeviceSink(HostSink):
    """Stands for a device: nothing is read into its memory, and copies to it end later, after the load has gone on."""

    def __init__(self, memory: memoryview) -> None:
        super().__init__(memory)
        self.memory = None
        self._stored: list[Callable[[], None]] = []
        self._lock = threading.Lock()

    def store(self, span: Any, staged: memoryview) -> None:
        store = super().store
        with self._lock:
            self._stored.append(lambda: store(span, staged))

    def fence(self) -> Any:
        return self

    def wait(self) -> None:
        with self._lock:
            stored, self._stored = self._stored, []
            for each in stored:
                each()


CASES: dict[str, tuple[str, Division]] = {
    **{name: (name, Division(2)) for name in formats.FORMATS},
    "INT4 over four": ("INT4", Division(4)),
    "AWQ over four": ("AWQ", Division(4)),
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return formats.write_drawn(tmp_path_factory.mktemp("plain"), {})


@pytest.mark.parametrize("name", CASES)
def test_ranks_read_shared_rows_once_in_every_format(plain: Path, tmp_path: Path, name: str) -> None:
    form, division = CASES[name]
    formats.FORMATS[form](plain, tmp_path)
    loaded = Loading(tmp_path, division).check()
    assert any(read.num_readers > 1 for read in loaded[0].reads)


@pytest.mark.parametrize(
    ("config", "division"),
    [
        ({"num_hidden_layers": 6}, Division(2)),
        ({}, Division(4)),
        ({"num_hidden_layers": 2}, Division(4, num_stages=2)),
        (MIXTURE, Division(2)),
        (MIXTURE, Division(2, 2)),
        (MIXTURE, Division(4, 2)),
        ({"architectures": ["Phi3ForCausalLM"], "model_type": "phi3"}, Division(2)),
    ],
)
@pytest.mark.parametrize(
    ("dtype", "quantize", "on_device"), [("bfloat16", None, False), ("float32", None, True), ("bfloat16", "int8", False)]
)
def test_ranks_read_shared_rows_once(
    tmp_path: Path, config: dict[str, Any], division: Division, dtype: str, quantize: str | None, on_device: bool
) -> None:
    """Rows of experts are shared by the ranks that have parts of the same experts. On a device copies end later."""
    folder = formats.write_drawn(tmp_path / "m", config)
    shared = [read for read in Loading(folder, division, dtype, quantize, on_device).check()[0].reads if read.num_readers > 1]
    names = {segment.tensor.name for read in shared for segment in read.segments}
    assert names
    assert all("o_proj" in name or "down_proj" in name for name in names)
    assert any("expert" in name for name in names) == ("num_experts" in config and division.inner_parts > 1)


@pytest.mark.parametrize("config", [MIXTURE, STACKED])
def test_ranks_that_divide_experts_together_read_a_mixture_once(tmp_path: Path, config: dict[str, Any]) -> None:
    """Only norms and routers, which are small, are read by each rank."""
    folder = formats.write_drawn(tmp_path / "m", {"num_key_value_heads": 4} | config)
    loaded = Loading(folder, Division(4, 2)).check()
    size_of = {name: tensor.nbytes for name, tensor in load_file(folder / "model.safetensors").items()}
    on_each = sum(num_bytes for name, num_bytes in size_of.items() if re.search("norm|mlp.gate.weight|router", name))
    assert sum(share.read_bytes for share in loaded) == sum(size_of.values()) + 3 * on_each


@pytest.mark.parametrize("on_device", [False, True])
def test_large_matrices_that_all_ranks_have_whole_are_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_device: bool
) -> None:
    monkeypatch.setattr(range_plan, "MIN_SHARED_BYTES", 4096)
    folder = write_checkpoint(tmp_path / "m", LATENTS, dtype="BF16", random_bytes=True)
    loaded = Loading(folder, Division(4), on_device=on_device).check()
    shared = {segment.tensor.name for read in loaded[0].reads if read.num_readers > 1 for segment in read.segments}
    assert {name.rsplit(".", 2)[1] for name in shared} == {"q_a_proj", "kv_a_proj_with_mqa", "o_proj", "down_proj"}


def test_frames_of_packed_files_are_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frame, "FRAME_VALUES", packed.FRAME_VALUES)
    alone = packed.pack_alone(write_packable(tmp_path / "m", 2, CONFIG | packed.WIDER))
    loaded = Loading(alone, Division(2)).check()
    assert all(segment.frame is not None for read in loaded[0].reads for segment in read.segments)
    assert loaded[0].given_bytes > 0


@pytest.mark.parametrize("cached", [True, False])
def test_a_rank_that_is_missing_is_done_without(plain: Path, monkeypatch: pytest.MonkeyPatch, cached: bool) -> None:
    """The others read its part of the rows from the file, once they have waited for it."""
    monkeypatch.setattr(file_reader, "is_cached", lambda *_: cached)
    monkeypatch.setattr(read_order, "PATIENCE_S", 0.05)
    loading = Loading(plain, Division(4))
    for rank, share in zip((0, 1, 3), loading.together(but=(2,)), strict=True):
        assert share.memory == loading.share(rank).memory


def test_ranks_may_load_one_after_the_other(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second finds what the first has offered last, and reads the rest."""
    monkeypatch.setattr(read_order, "PATIENCE_S", 0.0)
    loading, memory = Loading(plain, Division(2)), shared_memory(2)
    views = [SharedReads(memory, rank, 2, SLOT_BYTES) for rank in range(2)]
    first = loading.share(0, views[:1])
    second = loading.share(1, views[1:])
    assert (first.given_bytes, first.memory) == (0, loading.share(0).memory)
    offered = [read.num_bytes for read in second.reads if read.num_readers > 1][: 2 * NUM_SLOTS : 2]
    assert 0 < second.given_bytes == sum(offered) < sum(read.num_bytes for read in second.reads if read.num_readers > 1)
    assert second.memory == loading.share(1).memory


def test_a_rank_whose_read_fails_leaves_the_others_their_reads(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetch, loading = FileReader.fetch, Loading(plain, Division(2))
    memory = shared_memory(2)

    def failing(self: FileReader, read: Read, at: Any, given: Any = None, offer: Any = None) -> Any:
        if offer is not None and threading.current_thread().name.startswith("reader") and offer.func.__self__.rank == 0:
            raise ReadFailed(read.file, read.segments[0].tensor.name, "broken")
        return fetch(self, read, at, given, offer)

    monkeypatch.setattr(FileReader, "fetch", failing)
    with ThreadPoolExecutor(2) as pool:
        bad, good = (pool.submit(loading.share, rank, [SharedReads(memory, rank, 2, SLOT_BYTES)]) for rank in range(2))
        with pytest.raises(ReadFailed, match="broken"):
            bad.result()
        assert good.result().memory == loading.share(1).memory


def reads_of(number: int, num_shared: int) -> list[Read]:
    """Returns `number` reads of one block each, of which the last num_shared are shared."""
    return [Read("f", 4096 * at, 4096 * (at + 1), (), 2 if at >= number - num_shared else 1) for at in range(number)]


def turns(order: ReadOrder, number: int) -> list[Turn | None]:
    return [order.next(lambda: False) for _ in range(number)]


def offer(shared: SharedReads, turn: Turn, order: ReadOrder) -> None:
    shared.offer(turn.number, turn.read, memoryview(bytes([turn.place]) * 4096))
    order.end(turn)


def test_what_another_rank_has_read_comes_first() -> None:
    """It may wait for its slot. What comes from it is what it has read."""
    memory, reads = shared_memory(2, 4096), reads_of(8, 4)
    views = [SharedReads(memory, rank, 2, 4096) for rank in range(2)]
    first, second = (ReadOrder(reads, [view]) for view in views)
    for turn in turns(first, 5):
        assert turn is not None
        if turn.offer is not None:
            offer(views[0], turn, first)
    given = second.next(lambda: False)
    assert given is not None
    assert (given.place, given.owner) == (4, 0)
    assert given.given is not None
    assert bytes(given.given) == bytes([4]) * 4096
    assert [turn.place for turn in turns(second, 4) if turn is not None] == [0, 1, 2, 3]


def test_nothing_is_offered_over_what_was_not_taken() -> None:
    """A rank that has read all else waits, and then reads for itself alone."""
    memory, reads = shared_memory(2, 4096), reads_of(4 * NUM_SLOTS, 4 * NUM_SLOTS)
    views = [SharedReads(memory, rank, 2, 4096) for rank in range(2)]
    first, second = (ReadOrder(reads, [view]) for view in views)
    for turn in turns(first, NUM_SLOTS):
        assert turn is not None
        assert turn.offer is not None
        offer(views[0], turn, first)
    assert not views[0].has_room(NUM_SLOTS)
    waiting = iter([False, False, True])
    assert first.next(lambda: next(waiting)) is None
    taken = [second.next(lambda: False) for _ in range(2)]
    assert [turn.place for turn in taken if turn is not None] == [0, 2]
    second.end(taken[1])  # type: ignore[arg-type]
    assert not views[0].has_room(NUM_SLOTS)  # the first one is still being copied
    second.end(taken[0])  # type: ignore[arg-type]
    assert views[0].has_room(NUM_SLOTS + 1)
    assert not views[0].has_room(NUM_SLOTS + 2)
    views[1].leave()
    assert views[0].has_room(NUM_SLOTS + 2)


def test_a_rank_that_has_waited_long_reads_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_order, "PATIENCE_S", 0.001)
    memory, num = shared_memory(2, 4096), 2 * NUM_SLOTS + 2
    view = SharedReads(memory, 0, 2, 4096)
    order = ReadOrder(reads_of(num, num), [view])
    found = turns(order, num)
    assert {turn.place for turn in found if turn is not None} == set(range(num))
    assert [turn.offer is not None for turn in found if turn is not None and turn.owner == 0] == [True] * NUM_SLOTS + [False]
    assert order.next(lambda: False) is None
    for turn in found:
        assert turn is not None
        order.end(turn)
    late = SharedReads(memory, 1, 2, 4096)
    assert late.look(0, NUM_SLOTS, reads_of(num, num)[-2]) is Offer.NONE


def test_a_read_that_differs_is_not_taken() -> None:
    """Ranks that planned other reads, which should not happen, must not get each other's bytes."""
    memory = shared_memory(2, 4096)
    one, other = (SharedReads(memory, rank, 2, 4096) for rank in range(2))
    read = reads_of(2, 2)[0]
    assert other.look(0, 0, read) is Offer.COMING
    one.offer(0, read, memoryview(bytes(4096)))
    assert other.look(0, 0, read) is Offer.READY
    assert other.look(0, 0, replace(read, end=read.end + 4096)) is Offer.NONE
    assert other.look(0, 0, replace(read, file="g")) is Offer.NONE


def test_ranks_with_other_experts_share_nothing_of_them() -> None:
    memory = np.zeros(stage_reads_bytes(4, 2, 4096), np.uint8)
    views = [shared_by(memory, rank, 4, 2, 4096) for rank in range(4)]
    assert [[view.size for view in shared] for shared in views] == [[4, 2]] * 4
    of_all, of_pair = reads_of(2, 2)
    views[0][0].offer(0, of_all, memoryview(bytes(4096)))
    views[0][1].offer(0, of_pair, memoryview(bytes(4096)))
    assert [shared[0].look(0, 0, of_all) for shared in views[1:]] == [Offer.READY] * 3
    assert [shared[1].look(0, 0, of_pair) for shared in views[1:]] == [Offer.READY, Offer.COMING, Offer.COMING]
    assert [leave(shared) for shared in views] == [False, False, False, True]
    with pytest.raises(ValueError, match="4096 bytes are not the memory of 4 ranks with 2 parts of experts"):
        shared_by(memory[:4096], 0, 4, 2, 4096)


@pytest.mark.parametrize(("size", "expert_parts", "sizes"), [(2, 1, [2]), (2, 2, [2]), (6, 2, [6, 3])])
def test_experts_have_memory_of_their_own_where_ranks_divide_them(size: int, expert_parts: int, sizes: list[int]) -> None:
    memory = np.zeros(stage_reads_bytes(size, expert_parts, 4096), np.uint8)
    for rank in range(size):
        assert [view.size for view in shared_by(memory, rank, size, expert_parts, 4096)] == sizes


def test_the_last_rank_to_leave_is_told() -> None:
    memory = shared_memory(3, 4096)
    views = [SharedReads(memory, rank, 3, 4096) for rank in range(3)]
    assert [view.leave() for view in views] == [False, False, True]
    with pytest.raises(ValueError, match="4096 bytes are not the memory of 3 ranks that share reads of 4096 bytes"):
        SharedReads(memory[:4096], 0, 3, 4096)


def test_of_one_device_nothing_is_shared(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m", CONFIG)
    with ExitStack() as stack:
        source = open_checkpoint(folder, "", stack)
        assert not any(read.num_readers > 1 for read in planned_reads(source, "float32", StagingRing(1, 8192), shares=True))
