"""Prompts computed behind the weights: an engine's loop by hand, with reads that wait for the test."""

from __future__ import annotations

import mmap
import os
import select
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.contracts import BatchPlan, StepResult
from engine.hosted_model import TorchModel
from engine.kv_transfer import KVTransfer
from engine.loading.weight_gate import WeightGate, WeightsWithdrawn
from engine.memory.cpu_memory import CpuMemory
from engine.memory.host_tier import HostTier
from engine.protocol import (
    JOURNAL_BYTES,
    Abort,
    Configure,
    Evicted,
    EvictModel,
    LoadDone,
    LoadFailed,
    LoadModel,
    LoadStreams,
    Message,
    SamplingParams,
    SetLease,
    Submit,
    TokensOut,
    read_journal,
)
from engine.steps.forward_batch import padded_rows
from engine.steps.sliced import slices
from engine.worker import Engine
from loader.catalog import scan_one
from loader.file_reader import Fetched, FileReader
from loader.range_plan import Read
from loader.sizing import WeightSlot, weight_layout
from loader.staging import StagingRing
from tests.engine.engine_process import load_message
from tests.engine.model_bench import BLOCK_TOKENS, MAX_LEN, make_checkpoint, make_runner
from tests.kernel_cache import CACHE_DIR, warm

CHUNK_BYTES, NUM_CHUNKS, NUM_SLOTS = 64 << 10, 256, 64
PROMPT = np.random.default_rng(5).integers(2, 211, 30).tolist()
GREEDY = SamplingParams(6, temperature=0.0)


class Collector:
    """engine.channel.Channel that keeps what the daemon would get."""

    backlog_bytes = 0

    def __init__(self) -> None:
        self.sent: list[Message] = []

    def send(self, message: Message) -> None:
        self.sent.append(message)


class Bench:
    """One engine. `allow(stage)`: reads that bring nothing for it or an earlier one wait; `reached`: the stage a step waits for."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        fd = os.memfd_create("tier")
        os.ftruncate(fd, NUM_SLOTS * CHUNK_BYTES)
        self.tier, self.slots = HostTier(os.dup(fd), NUM_SLOTS, CHUNK_BYTES), fd
        memory = CpuMemory(NUM_CHUNKS, CHUNK_BYTES)
        configure = Configure("cpu:0", NUM_CHUNKS, CHUNK_BYTES, 0, 64, BLOCK_TOKENS, 10.0, 1, cache_dir=CACHE_DIR)
        runner = make_runner(memory, tier=self.tier)
        runner._ring = StagingRing(4, 16 << 10)  # several reads a layer
        self.channel = Collector()
        self.journal = mmap.mmap(-1, JOURNAL_BYTES)
        self.engine = Engine(self.channel, self.journal, configure, runner, memory, self.tier)  # type: ignore[arg-type]
        self.changed = threading.Condition()
        self.allowed, self.reached = 99, -1
        self.spoil: Callable[[Read], None] = lambda read: None
        fetch, wait = FileReader.fetch, WeightGate.wait

        def held_fetch(reader: FileReader, read: Read) -> Fetched:
            with self.changed:
                assert self.changed.wait_for(lambda: min(segment.stage for segment in read.segments) <= self.allowed, 30)
            self.spoil(read)
            return fetch(reader, read)

        def noted_wait(gate: WeightGate, stage: int) -> None:
            with self.changed:
                self.reached = stage
                self.changed.notify_all()
            wait(gate, stage)

        monkeypatch.setattr(FileReader, "fetch", held_fetch)
        monkeypatch.setattr(WeightGate, "wait", noted_wait)

    def allow(self, stage: int) -> None:
        with self.changed:
            self.allowed = stage
            self.changed.notify_all()

    def pump(self, done: Callable[[], Any], seconds: float = 60.0) -> Any:
        """The engine's loop, until `done`."""
        engine = self.engine
        for _ in range(int(seconds / 0.02)):
            if found := done():
                return found
            if select.select([engine.placements.fileno()], [], [], 0.0 if engine.models.busy() else 0.02)[0]:
                engine.placements.take()
            engine._start_first_steps()
            if busy := engine.models.busy():
                engine._turn(busy)
        raise AssertionError(f"nothing came of it: {self.channel.sent}")

    def until(self, kind: type[Any]) -> Any:
        return self.pump(lambda: next((message for message in self.channel.sent if isinstance(message, kind)), None))

    def until_waits_for(self, stage: int) -> None:
        self.pump(lambda: self.reached >= stage)

    def spec(self, **changes: Any) -> LoadModel:
        values: dict[str, Any] = {"dtype": "float32", "fingerprint": scan_one(self.folder).fingerprint, "weights_chunks": 12}
        values |= {"kv_reserved_chunks": 20, "lease_chunks": 64, "max_model_len": MAX_LEN, "max_sequences": 8, "eos_token_ids": []}
        return load_message(str(self.folder), "m", **(values | changes))

    def load(self, **changes: Any) -> None:
        self.reached = -1
        self.channel.sent.clear()
        self.engine._handle(self.spec(**changes))

    def submit(self, request_id: int, prompt: list[int] = PROMPT, params: SamplingParams = GREEDY) -> None:
        self.engine._handle(Submit(request_id, "m", prompt, params))

    def tokens(self, request_id: int) -> list[int]:
        out = [message for message in self.channel.sent if isinstance(message, TokensOut)]
        pairs = [(request, token) for message in out for request, token in zip(message.request_ids, message.ids, strict=True)]
        return [token for request, token in pairs if request == request_id]

    def until_answered(self, *request_ids: int) -> list[list[int]]:
        self.pump(lambda: all(len(self.tokens(request_id)) == GREEDY.max_tokens for request_id in request_ids))
        return [self.tokens(request_id) for request_id in request_ids]

    def evict(self) -> None:
        self.channel.sent.clear()
        self.engine._handle(EvictModel(9, "m", 64))
        self.until(Evicted)
        assert not self.engine.models.by_name
        assert not self.engine._model_of
        chunks = self.engine.models.chunks
        assert chunks.free.all()
        assert (chunks.num_drawn, chunks.num_reserved, chunks.num_weights, chunks.num_leaving) == (0, 0, 0, 0)

    def kinds(self) -> list[str]:
        return [type(message).__name__ for message in self.channel.sent]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    warm()
    folder = tmp_path_factory.mktemp("llama")
    make_checkpoint(folder, tie_word_embeddings=False)
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A copy that the test may spoil."""
    for file in saved.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


@pytest.fixture
def bench(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    made = Bench(folder, monkeypatch)
    yield made
    made.allow(99)


@pytest.fixture
def wanted(bench: Bench) -> list[int]:
    """What a model that is loaded already says to PROMPT."""
    bench.load()
    bench.until(LoadDone)
    bench.submit(1)
    (tokens,) = bench.until_answered(1)
    bench.evict()
    return tokens


def test_a_prompt_is_computed_layer_by_layer_as_weights_come(bench: Bench, wanted: list[int]) -> None:
    bench.allow(1)
    bench.load()
    bench.until(LoadStreams)
    bench.submit(7)
    bench.submit(8, PROMPT[:9])
    bench.until_waits_for(2)  # the embedding and the first layer are computed, and the second is not there
    assert set(read_journal(bench.journal)) == {7, 8}  # whose death it would be
    assert bench.kinds().count("LoadDone") == 0
    bench.allow(3)
    bench.until_waits_for(3)
    bench.submit(9)  # comes too late for the step that runs
    bench.allow(99)
    assert bench.until_answered(7, 9) == [wanted, wanted]
    kinds = bench.kinds()
    assert kinds.index("LoadStreams") < kinds.index("LoadDone") < kinds.index("TokensOut")
    assert not bench.engine.placements.first
    bench.pump(lambda: not bench.engine.models.busy())
    bench.evict()


def test_a_model_nobody_asks_is_loaded_as_ever(bench: Bench, wanted: list[int]) -> None:
    bench.load()
    bench.until(LoadDone)
    bench.submit(3)
    assert bench.until_answered(3) == [wanted]
    bench.evict()


def truncate(folder: Path, read: Read) -> None:
    if min(segment.stage for segment in read.segments) == 3:
        os.truncate(folder / "model.safetensors", read.begin)


def test_a_file_that_ends_too_early_fails_the_load_and_no_token_comes(bench: Bench, wanted: list[int], folder: Path) -> None:
    file = folder / "model.safetensors"
    whole, stat = file.read_bytes(), file.stat()
    bench.allow(1)
    bench.load()
    bench.until(LoadStreams)
    bench.submit(7)
    bench.until_waits_for(2)
    bench.spoil = lambda read: truncate(folder, read)
    bench.allow(99)
    failed: LoadFailed = bench.until(LoadFailed)
    assert failed.permanent
    for part in ("CheckpointError: model.safetensors: tensor model.layers.", "the file ends at offset", "bytes too early"):
        assert part in failed.error
    assert "TokensOut" not in bench.kinds()
    assert not bench.engine._model_of
    assert not bench.engine.placements.busy
    assert bench.engine.models.chunks.free.all()
    bench.spoil = lambda read: None
    file.write_bytes(whole)
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    bench.load()  # what the failed one left behind is no hindrance
    bench.until(LoadStreams)
    bench.submit(7)
    assert bench.until_answered(7) == [wanted]


def test_a_file_that_changes_fails_the_load_at_its_end(bench: Bench, folder: Path) -> None:
    """All layers are computed by then; nothing of it is told."""
    bench.allow(3)
    bench.load()
    bench.until(LoadStreams)
    bench.submit(7)
    bench.until_waits_for(3)
    os.utime(folder / "model.safetensors", ns=(1, 1))
    bench.allow(99)
    failed: LoadFailed = bench.until(LoadFailed)
    assert not failed.permanent
    assert "changed since the model was registered" in failed.error
    assert "TokensOut" not in bench.kinds()


def test_a_withdrawn_load_ends_its_step(bench: Bench) -> None:
    bench.allow(1)
    bench.load()
    bench.until(LoadStreams)
    bench.submit(7)
    bench.until_waits_for(2)
    bench.engine._handle(EvictModel(9, "m", 64))
    bench.allow(99)
    gone: Evicted = bench.until(Evicted)
    assert gone.placement_id == 9
    assert not {"TokensOut", "LoadDone", "LoadFailed"} & set(bench.kinds())
    assert bench.engine.models.chunks.free.all()


def test_what_comes_during_the_step_waits_for_its_end(bench: Bench, wanted: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """An abort, a lease, an eviction: of a step that goes on after its load has ended."""
    may_end = threading.Event()
    opened = WeightGate.open

    def late_open(gate: WeightGate) -> None:
        threading.Thread(target=lambda: (may_end.wait(60), opened(gate))).start()

    monkeypatch.setattr(WeightGate, "open", late_open)
    bench.allow(1)
    bench.load()
    bench.until(LoadStreams)
    bench.submit(7)
    bench.submit(8, PROMPT[:12])
    bench.until_waits_for(2)
    bench.allow(99)
    bench.until(LoadDone)
    bench.engine._handle(SetLease(0))
    bench.submit(9)
    bench.submit(10)
    bench.engine._handle(Abort([8, 10, 11]))
    assert bench.engine.placements.first
    may_end.set()
    bench.engine._handle(SetLease(64))
    assert bench.until_answered(7, 9) == [wanted, wanted]
    bench.pump(lambda: not bench.engine.models.busy())
    assert not bench.tokens(10)
    assert len(bench.tokens(8)) <= 1  # of the step that was under way
    may_end.clear()
    bench.evict()
    bench.allow(1)
    bench.load()
    bench.until(LoadStreams)
    bench.submit(7)
    bench.until_waits_for(2)
    bench.allow(99)
    bench.until(LoadDone)
    bench.channel.sent.clear()
    bench.engine._handle(EvictModel(9, "m", 64))
    assert "Evicted" not in bench.kinds()
    may_end.set()
    bench.until(Evicted)
    assert bench.engine.models.chunks.free.all()


@pytest.mark.parametrize("good", [True, False])
def test_weights_from_the_host_tier_come_through_the_same_gate(bench: Bench, wanted: list[int], good: bool) -> None:
    """A copy that does not match is noticed at its end: what was computed is void, and is computed again from the drive's."""
    bench.load(keep_slots=list(range(12)))
    done: LoadDone = bench.until(LoadDone)
    bench.evict()
    if not good:
        bench.tier.slot(2)[100] ^= 1
    bench.allow(1)  # holds the reads, should there be any
    bench.load(source_slots=list(range(12)), checksum=done.checksum)
    bench.until(LoadStreams)
    bench.submit(7)
    if not good:
        bench.until_waits_for(2)
        bench.allow(99)
    assert bench.until_answered(7) == [wanted]
    loaded: LoadDone = bench.until(LoadDone)
    assert bool(loaded.source_rejected) == (not good)
    assert (loaded.bytes_read == 0) == good


def answered_and_saved(bench: Bench) -> dict[str, Any]:
    """The model has said what it says to PROMPT and left; what a load must carry to take its KV back."""
    bench.load()
    bench.until(LoadDone)
    bench.submit(1)
    bench.until_answered(1)
    bench.channel.sent.clear()
    bench.engine._handle(EvictModel(9, "m", 64, list(range(NUM_SLOTS))))
    gone: Evicted = bench.until(Evicted)
    assert gone.saved_kv_tokens >= len(PROMPT)
    return {"kv_slots": gone.kv_slots_used, "kv_index": gone.kv_index}


@pytest.fixture
def may_copy(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Copies of KV wait for it."""
    event, run = threading.Event(), KVTransfer.run
    event.set()

    def held_run(transfer: KVTransfer) -> None:
        assert event.wait(60)
        run(transfer)

    monkeypatch.setattr(KVTransfer, "run", held_run)
    return event


def restored_blocks(bench: Bench, request_id: int) -> int:
    """Tokens of its prompt that were found in restored KV."""
    out = [message for message in bench.channel.sent if isinstance(message, TokensOut)]
    return next((message.cached[request_id] for message in out if request_id in message.cached), 0)


def test_saved_kv_comes_beside_the_weights_and_before_a_prompt(bench: Bench, wanted: list[int], may_copy: threading.Event) -> None:
    saved = answered_and_saved(bench)
    may_copy.clear()
    bench.allow(1)
    bench.load(**saved)
    bench.pump(lambda: bench.engine.placements.first)
    assert "LoadStreams" not in bench.kinds(), "a prompt would not find its KV"
    may_copy.set()
    bench.until(LoadStreams)
    bench.submit(7)
    bench.until_waits_for(2)
    assert "LoadDone" not in bench.kinds()
    bench.allow(99)
    assert bench.until_answered(7) == [wanted]
    assert bench.until(LoadDone).restored_kv_tokens >= len(PROMPT)
    assert restored_blocks(bench, 7) >= len(PROMPT) - BLOCK_TOKENS
    bench.pump(lambda: not bench.engine.models.busy())
    bench.evict()


def test_weights_that_are_there_first_wait_for_saved_kv(bench: Bench, wanted: list[int], may_copy: threading.Event) -> None:
    saved = answered_and_saved(bench)
    may_copy.clear()
    bench.load(**saved)
    bench.pump(lambda: bench.engine.placements._restoring)
    assert "LoadDone" not in bench.kinds()
    may_copy.set()
    done: LoadDone = bench.until(LoadDone)
    assert done.restored_kv_tokens >= len(PROMPT)
    assert done.copy_seconds > 0, "what the KV took longer than the weights"
    bench.submit(7)
    assert bench.until_answered(7) == [wanted]
    assert restored_blocks(bench, 7) >= len(PROMPT) - BLOCK_TOKENS
    bench.evict()


@pytest.mark.parametrize("how", ["withdrawn", "spoilt", "evicted"])
def test_a_load_that_comes_to_nothing_frees_its_blocks_when_they_are_copied(
    bench: Bench, wanted: list[int], folder: Path, may_copy: threading.Event, how: str
) -> None:
    saved = answered_and_saved(bench)
    may_copy.clear()
    bench.allow(1)
    bench.load(**saved)
    bench.pump(lambda: bench.engine.placements.first)
    if how == "withdrawn":
        bench.engine._handle(EvictModel(9, "m", 64))
    elif how == "spoilt":
        bench.spoil = lambda read: truncate(folder, read)
    bench.allow(99)
    bench.pump(lambda: bench.engine.placements._restoring)
    if how == "evicted":
        bench.engine._handle(EvictModel(9, "m", 64))
    chunks = bench.engine.models.chunks
    assert not chunks.free.all(), "KV is still on its way into them"
    may_copy.set()
    bench.until(LoadFailed if how == "spoilt" else Evicted)
    assert bench.kinds().count("Evicted") + bench.kinds().count("LoadFailed") == 1
    assert not {"LoadDone", "LoadStreams"} & set(bench.kinds())
    assert chunks.free.all()
    assert not bench.engine.placements.busy


def computed_at_once(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The tokens of each step behind weights."""
    told: list[int] = []
    execute = TorchModel.execute_behind

    def noted(model: TorchModel, gate: WeightGate, plan: BatchPlan, *rest: Any) -> StepResult:
        told.append(int(plan.num_new.sum()))
        return execute(model, gate, plan, *rest)

    monkeypatch.setattr(TorchModel, "execute_behind", noted)
    return told


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_long_prompts_are_computed_in_slices(bench: Bench, monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    """max_num_batched_tokens 64: two prompts of 100 and one of 31 tokens in one step behind the weights, where nobody else has one;
    then their blocks are prefixes."""
    told = computed_at_once(bench, monkeypatch)
    random = np.random.default_rng(6)
    prompts = [random.integers(2, 211, length).tolist() for length in (100, 100, 31)]
    bench.load(dtype=dtype)
    bench.until(LoadDone)
    alone = []
    for number, prompt in enumerate(prompts):
        bench.submit(number + 1, prompt)
        alone += bench.until_answered(number + 1)
    bench.evict()
    bench.allow(0)
    bench.load(dtype=dtype)
    bench.until(LoadStreams)
    for number, prompt in enumerate(prompts):
        bench.engine._handle(Submit(number + 11, "m", prompt, GREEDY))
    bench.until_waits_for(1)
    bench.allow(99)
    assert bench.until_answered(11, 12, 13) == alone
    assert told == [231]
    bench.submit(14, prompts[0])
    assert bench.until_answered(14) == [alone[0]]
    cached = [message.cached for message in bench.channel.sent if isinstance(message, TokensOut) and message.cached]
    assert cached[0][14] >= 96


def test_beside_steps_of_others_a_first_step_is_like_any(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    told = computed_at_once(bench, monkeypatch)
    prompt = np.random.default_rng(6).integers(2, 211, 100).tolist()
    bench.load()
    bench.until(LoadDone)
    bench.submit(1, prompt)
    (alone,) = bench.until_answered(1)
    bench.evict()
    bench.allow(1)
    bench.load()
    bench.until(LoadStreams)
    bench.submit(2, prompt)
    with monkeypatch.context() as patched:
        patched.setattr(bench.engine.models, "busy", lambda: ["another"])
        bench.engine._start_first_steps()
    bench.until_waits_for(2)
    bench.allow(99)
    assert bench.until_answered(2) == [alone]
    assert told == [64]


@pytest.mark.parametrize("max_tokens", [7, 16, 24, 50, 64, 512])
def test_slices_hold_each_token_once_and_in_order(max_tokens: int) -> None:
    random = np.random.default_rng(max_tokens)
    for _ in range(20):
        num_rows = int(random.integers(1, 9))
        num_new = random.integers(1, 200, num_rows).astype(np.int32)
        num_computed = random.integers(0, 50, num_rows).astype(np.int32)
        slots = random.permutation(20)[:num_rows].astype(np.int32)
        plan = BatchPlan(3, "m", slots, num_computed, num_new, np.ones(num_rows, np.bool_))
        wanted = [
            (slot, first + at) for slot, first, count in zip(slots, num_computed, num_new, strict=True) for at in range(count)
        ]
        parts = slices(plan, max_tokens)
        sizes = [int(part.num_new.sum()) for part in parts]
        assert max(sizes) <= max_tokens
        assert len(set(sizes[:-1])) <= 1
        assert not any(part.samples.any() for part in parts)
        found = [
            (slot, first + at)
            for part in parts
            for slot, first, count in zip(part.slots, part.num_computed, part.num_new, strict=True)
            for at in range(count)
        ]
        assert found == wanted
        if max_tokens >= 8:  # a slice with its padding ends within the whole with its own
            begin = sum(sizes[:-1])
            assert all(padded_rows(size) == size for size in sizes[:-1])
            assert begin + padded_rows(sizes[-1]) <= padded_rows(sum(sizes))


class TestWeightGate:
    LAYOUT = (
        WeightSlot("embed", (4,), 0, 8),
        WeightSlot("layers.0.a", (4,), 64, 8),
        WeightSlot("layers.0.b", (2, 4), 72, 8, scales_at_bytes=128),
        WeightSlot("layers.1.a", (4,), 192, 8),
        WeightSlot("norm", (4,), 256, 8),
    )

    def test_a_stage_opens_with_its_last_byte(self) -> None:
        gate = WeightGate(self.LAYOUT)
        computed: list[str] = []
        thread = threading.Thread(target=lambda: computed.extend(gate.behind(iter(["first", "second"]))))
        gate.landed(192, 300)
        gate.landed(0, 77)
        thread.start()
        gate.landed(77, 132)  # without the second scale
        assert computed == []
        with gate.step():
            gate.wait(0)
            gate.wait(2)
        gate.landed(132, 192)
        thread.join(0.2)
        assert thread.is_alive()  # all is there, and nobody has said that it is good
        gate.open()
        thread.join(60)
        assert computed == ["first", "second"]
        assert gate.waited_s > 0.1

    def test_it_is_told_once_that_the_first_weights_are_there(self) -> None:
        told: list[int] = []
        gate = WeightGate(self.LAYOUT)
        gate.begun = lambda: told.append(1)
        gate.landed(64, 300)
        gate.landed(0, 7)
        assert told == []
        gate.landed(7, 8)
        assert told == [1]
        gate.begin_anew()
        gate.landed(0, 300)
        assert told == [1]

    def test_withdrawing_waits_for_the_step(self) -> None:
        gate = WeightGate(self.LAYOUT)
        inside, left = threading.Event(), threading.Event()
        errors: list[str] = []

        def step() -> None:
            try:
                with gate.step():
                    inside.set()
                    gate.wait(1)
            except WeightsWithdrawn as error:
                errors.append(str(error))
            left.set()

        threading.Thread(target=step).start()
        assert inside.wait(60)
        gate.withdraw("a bad sector")
        assert left.wait(60)
        assert errors == ["a bad sector"]
        with pytest.raises(WeightsWithdrawn), gate.step():
            raise AssertionError("begun on weights that are withdrawn")

    def test_beginning_anew_counts_from_nothing(self) -> None:
        gate = WeightGate(self.LAYOUT)
        gate.landed(0, 300)
        gate.begin_anew()
        with gate.step():
            thread = threading.Thread(target=lambda: gate.wait(0))
            thread.start()
            thread.join(0.1)
            assert thread.is_alive()
            gate.landed(0, 8)
            thread.join(60)
            assert not thread.is_alive()


def test_the_layout_of_a_model_has_a_stage_for_each_layer(saved: Path) -> None:
    shape = scan_one(saved).shape
    assert shape is not None
    assert len(WeightGate(weight_layout(shape, "float32"))._left_bytes) == shape.num_layers + 2
