"""Adapters come into memory on demand, and whatever fails on the way ends their requests alone."""

from __future__ import annotations

import itertools
import random
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from engine.protocol import AdapterLoaded, AdapterSource, Message, SamplingParams
from engine.serve import adapter_loads
from engine.serve.adapter_loads import AdapterLoads, AdapterRead
from engine.serve.identity import adapter_identity
from engine.serve.served_models import ServedModel
from loader.errors import CheckpointChanged, CheckpointError
from scheduler.batch.request import BatchRequest
from scheduler.batch.step_limits import PATIENT_STEPS
from tests.engine.test_served_models import CHUNK_BYTES, Node

MANY = 40


def source(name: str) -> AdapterSource:
    return AdapterSource(name, f"/{name}", "print")


class FakeMemory:
    """A model's tables, and files of `num_bytes` each."""

    def __init__(self) -> None:
        self.num_bytes: dict[str, int] = {}
        self.error: Exception | None = None
        self.set_error: Exception | None = None
        self.known: dict[int, int] = {}

    def prepare(self) -> None:
        pass

    def read(self, source: AdapterSource) -> Any:
        if self.error is not None:
            raise self.error
        num_bytes = self.num_bytes.get(source.name, CHUNK_BYTES)
        return SimpleNamespace(layout=SimpleNamespace(num_bytes=num_bytes), data=np.zeros(num_bytes, np.uint8))

    def set(self, number: int, first_byte: int, layout: Any) -> None:
        self.known[number] = first_byte
        if self.set_error is not None:
            raise self.set_error

    def clear(self, number: int) -> None:
        self.known.pop(number, None)


class FakeChunks:
    """Device memory that notes where something is written."""

    chunk_bytes = CHUNK_BYTES

    def __init__(self) -> None:
        self.arena = SimpleNamespace(data_ptr=lambda: 1 << 40)
        self.written: list[int] = []
        self.error: Exception | None = None

    def copy_in(self, address: int, data: Any) -> Any:
        if self.error is not None:
            raise self.error
        self.written.append((address - (1 << 40)) // CHUNK_BYTES)
        return SimpleNamespace(wait=lambda: 0)


class Desk:
    """The engine's loop as far as adapters go. Threads are run when a test says so."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.node = Node(folder)
        self.now = 0.0
        self.memory, self.chunks = FakeMemory(), FakeChunks()
        self.reads: list[AdapterRead] = []
        self.sent: list[Message] = []
        self.failed: dict[int, str] = {}
        self.num_waits = 0
        self.loads = AdapterLoads(self.node.models, self.chunks, self, self.sent.append, self._fail, self._await_steps)  # type: ignore[arg-type]
        self.node.load("m", **options).adapter_memory = self.memory  # type: ignore[assignment]
        self.served.scheduler.adapters.dropped = self.memory.clear

    @property
    def served(self) -> ServedModel:
        return self.node.models.by_name["m"]

    def read(self, read: AdapterRead) -> None:
        self.reads.append(read)

    def _fail(self, request_id: int, code: str, error: str) -> None:
        self.failed[request_id] = f"{code}: {error.removeprefix('model m: ')}"

    def _await_steps(self) -> None:
        self.num_waits += 1

    def submit(self, request_id: int, adapter: str, num_prompt: int = 5) -> None:
        assert self.loads.why_not(self.served) == ""
        tokens, key = np.full(num_prompt, request_id, np.int32), adapter_identity(source(adapter))
        self.served.scheduler.submit(BatchRequest(request_id, tokens, num_prompt, SamplingParams(4), adapter=key))

    def look(self, may_free_memory: bool = True) -> None:
        served = [self.served] if "m" in self.node.models.by_name and self.loads.is_wanted(self.served) else []
        self.loads.look_after(served, may_free_memory)

    def finish_reads(self) -> None:
        reads, self.reads = self.reads, []
        for read in reads:
            read.run()
            self.loads.ended(read)


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Desk:
    desk = Desk(tmp_path)
    monkeypatch.setattr(adapter_loads, "time", SimpleNamespace(monotonic=lambda: desk.now))
    return desk


def test_an_adapter_is_read_once_for_all_that_wait_for_it(desk: Desk) -> None:
    for request_id in range(1, 4):
        desk.submit(request_id, "a")
        desk.look()
    assert [read.source.name for read in desk.reads] == ["a"]
    assert not desk.served.scheduler.runnable
    desk.finish_reads()
    desk.look()
    (loaded,) = desk.sent
    assert isinstance(loaded, AdapterLoaded)
    assert (loaded.model, loaded.adapter, loaded.num_bytes) == ("m", "a", CHUNK_BYTES)
    assert desk.num_waits == 1, "no step is under way while memory is written"
    (first_byte,) = desk.memory.known.values()
    assert desk.chunks.written == [first_byte // CHUNK_BYTES]
    desk.node.run("m")
    assert not desk.loads.under_way
    assert not desk.failed
    stats = desk.node.models.stats(1)
    assert stats.adapters == {"m": {"a": CHUNK_BYTES}}


def test_a_broken_one_fails_its_requests_alone_and_is_read_again_for_the_next(desk: Desk) -> None:
    desk.submit(1, "a")
    desk.memory.error = CheckpointError("adapter_config.json", None, "key r: -3 is not possible")
    desk.look()
    desk.finish_reads()
    desk.look()
    assert desk.failed == {1: "adapter_unusable: adapter a: adapter_config.json: key r: -3 is not possible"}
    desk.memory.error = RuntimeError("no idea")
    desk.submit(2, "a")
    desk.look()
    desk.finish_reads()
    desk.look()
    assert desk.failed[2] == "adapter_unavailable: adapter a: RuntimeError: no idea"
    desk.memory.error = None
    desk.submit(3, "a")
    desk.look()
    desk.finish_reads()
    desk.look()
    desk.node.run("m")
    assert 3 not in desk.failed


@pytest.mark.parametrize("is_ahead", [False, True])
@pytest.mark.parametrize("is_set", [False, True])
def test_a_lack_of_memory_for_the_copy_fails_its_requests_alone(desk: Desk, is_set: bool, is_ahead: bool) -> None:
    chunks = desk.node.models.chunks
    room = chunks.room_chunks
    error = RuntimeError("CUDA error: out of memory\nat some call")
    if is_set:
        desk.memory.set_error = error
    else:
        desk.chunks.error = error
    if is_ahead:
        desk.loads.bring(desk.served, source("a"))
    else:
        desk.submit(1, "a")
    desk.look()
    desk.finish_reads()
    desk.look()
    assert ("adapter_unavailable" in desk.failed[1] and "out of memory" in desk.failed[1]) if not is_ahead else not desk.failed
    assert not desk.loads.under_way
    assert not desk.loads.is_wanted(desk.served)
    assert chunks.room_chunks == room
    assert not desk.memory.known
    desk.memory.set_error = desk.chunks.error = None
    desk.submit(2, "a")
    desk.look()
    desk.finish_reads()
    desk.look()
    desk.node.run("m")
    assert 2 not in desk.failed


def test_any_other_error_of_the_copy_ends_the_engine(desk: Desk) -> None:
    desk.chunks.error = RuntimeError("CUDA error: an illegal memory access was encountered")
    desk.submit(1, "a")
    desk.look()
    desk.finish_reads()
    with pytest.raises(RuntimeError, match="illegal"):
        desk.look()


def test_files_that_do_not_answer_hold_up_their_own_requests_alone(desk: Desk) -> None:
    for number in range(adapter_loads.MAX_READS):
        desk.submit(number + 1, f"hung-{number}")
    desk.submit(100, "good")
    desk.look()
    hung, desk.reads = desk.reads, []
    for read in hung:
        read.is_prepared = True
    assert len(hung) == adapter_loads.MAX_READS, "the next has to wait for one of them"
    desk.now = adapter_loads.READ_LIMIT_S + 1
    hung[0].is_prepared = False
    desk.look()
    assert sorted(desk.failed) == [2, 3, 4], "the first waits for kernels"
    hung[0].is_prepared = True
    desk.look()
    assert sorted(desk.failed) == [1, 2, 3, 4]
    assert "does not answer" in desk.failed[1] or "do not answer" in desk.failed[1]
    desk.look()
    desk.finish_reads()
    desk.look()
    assert 100 not in desk.failed
    assert not desk.served.scheduler.adapters.num_waiting
    desk.submit(5, "hung-0")
    desk.look()
    assert 5 in desk.failed, "another thread would hang as well"
    hung[0].run()
    desk.loads.ended(hung[0])
    desk.submit(6, "hung-0")
    desk.look()
    desk.finish_reads()
    desk.look()
    assert 6 not in desk.failed


def test_what_a_client_is_told_names_no_path(desk: Desk) -> None:
    for request_id, error in enumerate(
        (
            CheckpointError("/a/adapter_config.json", None, "is broken"),
            CheckpointChanged("/a: files changed"),
            OSError(5, "no", "/a"),
        ),
        1,
    ):
        desk.submit(request_id, "a")
        desk.memory.error = error
        desk.look()
        desk.finish_reads()
        desk.look()
    assert list(desk.failed.values()) == [
        "adapter_unusable: adapter a: adapter_config.json: is broken",
        "adapter_unavailable: adapter a: its folder: files changed",
        "adapter_unavailable: adapter a: OSError: [Errno 5] no: 'its folder'",
    ]


def test_so_many_files_that_do_not_answer_are_the_last_to_be_tried(desk: Desk) -> None:
    num_hung = adapter_loads.MAX_OVERDUE + adapter_loads.MAX_READS
    for number in range(num_hung):
        desk.submit(number + 1, f"hung-{number}")
    for _ in range(num_hung):
        desk.look()
        for read in desk.reads:
            read.is_prepared = True
        desk.now += adapter_loads.READ_LIMIT_S + 1
    assert len(desk.failed) == num_hung
    assert len(desk.reads) == adapter_loads.MAX_OVERDUE, "each has a thread"
    assert "the files of 16 other adapters do not answer" in desk.failed[num_hung]
    desk.loads.forget("m")
    desk.submit(99, "good")
    desk.look()
    assert "the files of 16 other adapters do not answer" in desk.failed[99], "threads outlive their model"
    desk.reads[0].run()
    desk.loads.ended(desk.reads.pop(0))
    desk.submit(100, "good")
    desk.look()
    assert desk.reads[-1].source.name == "good", "one thread has ended"
    desk.reads = desk.reads[-1:]
    desk.finish_reads()
    desk.look()
    assert desk.served.scheduler.adapters.is_resident(adapter_identity(source("good")))


def test_without_room_it_waits_as_long_as_something_may_make_some(desk: Desk) -> None:
    desk.memory.num_bytes["big"] = 17 * CHUNK_BYTES  # the lease has 16 chunks
    desk.submit(1, "big")
    desk.look()
    desk.finish_reads()
    desk.look(may_free_memory=True)
    desk.now = 60.0
    desk.look(may_free_memory=True)
    assert not desk.failed
    assert desk.node.models.stats(1).without_room == {"m": 1}
    desk.look(may_free_memory=False)
    desk.now += adapter_loads.NO_ROOM_LIMIT_S + 1
    desk.look(may_free_memory=False)
    assert desk.failed[1].startswith("no_adapter_room: adapter big: it takes 17 adjacent chunks")
    assert "16 chunks for adapters and KV" in desk.failed[1]
    assert not desk.loads.under_way


def test_what_a_look_takes_does_not_depend_on_how_many_are_wanted(desk: Desk) -> None:
    def calls_of_a_look() -> int:
        calls: list[str] = []
        sys.setprofile(lambda frame, event, argument: calls.append(event))
        try:
            desk.look()
        finally:
            sys.setprofile(None)
        return len(calls)

    for request_id in range(1, 21):
        desk.submit(request_id, f"adapter-{request_id}")
    desk.look()
    few = calls_of_a_look()
    for request_id in range(21, 1001):
        desk.submit(request_id, f"adapter-{request_id}")
    assert calls_of_a_look() == few
    assert len(desk.reads) == adapter_loads.MAX_READS


def test_a_smaller_lease_takes_the_memory_of_an_adapter_that_runs(desk: Desk) -> None:
    desk.submit(1, "a")
    desk.look()
    desk.finish_reads()
    desk.look()
    desk.node.step("m")
    assert desk.served.scheduler.num_running == 1
    assert desk.served.scheduler.kv.num_drawn_chunks == 0, "its KV lies in what the model owns"
    desk.node.models.set_lease(0)
    assert desk.node.models.chunks.room_chunks == 0
    assert not desk.memory.known
    desk.node.models.set_lease(16)
    desk.look()
    desk.finish_reads()
    desk.look()
    desk.node.run("m")
    assert not desk.failed
    assert not desk.served.scheduler.num_waiting + desk.served.scheduler.num_running


def test_a_large_one_finds_room_among_requests_that_come_and_go(desk: Desk) -> None:
    """Each chunk that becomes free would be drawn for the next of them, and the adapter takes ten adjacent ones of 16."""
    scheduler, choose, ids = desk.served.scheduler, random.Random(3), itertools.count(10)

    def step() -> None:
        while len(scheduler.waiting) < 8:
            desk.node.submit("m", next(ids), choose.randint(20, 100), choose.randint(10, 60))
        desk.node.step("m")

    for _ in range(60):
        step()
    desk.memory.num_bytes["big"] = 10 * CHUNK_BYTES
    desk.submit(1, "big")
    desk.look()
    desk.finish_reads()
    for _ in range(4 * PATIENT_STEPS):  # not every step frees something, so that it is tried again
        desk.look()
        if desk.memory.known:
            break
        step()
    assert desk.memory.known
    assert desk.node.models.chunks.kept is None
    for _ in range(60):
        step()
    assert 1 not in scheduler
    assert not desk.failed


def test_a_larger_lease_lets_it_in(desk: Desk) -> None:
    desk.memory.num_bytes["big"] = 17 * CHUNK_BYTES
    desk.submit(1, "big")
    desk.look()
    desk.finish_reads()
    desk.look()
    assert desk.served.scheduler.adapters.num_waiting
    desk.node.models.set_lease(20)
    desk.look()
    assert not desk.served.scheduler.adapters.num_waiting


def test_a_smaller_lease_drops_idle_ones_first(desk: Desk) -> None:
    desk.submit(1, "a")
    desk.look()
    desk.finish_reads()
    desk.look()
    desk.node.run("m")
    assert desk.memory.known
    desk.node.models.set_lease(0)
    assert not desk.memory.known
    assert desk.node.models.chunks.num_drawn == 0


def test_what_was_read_for_requests_that_have_gone_is_dropped(desk: Desk) -> None:
    desk.submit(1, "a")
    desk.look()
    desk.served.scheduler.abort(1)
    desk.finish_reads()
    assert desk.loads.under_way
    desk.look()
    assert not desk.loads.under_way


def test_a_model_that_leaves_takes_its_adapters_along(desk: Desk) -> None:
    desk.submit(1, "a")
    desk.look()
    desk.finish_reads()
    desk.look()
    desk.submit(2, "b")
    desk.look()
    desk.node.remove("m")
    desk.loads.forget("m")
    desk.finish_reads()
    desk.look()
    assert not desk.loads.under_way
    assert desk.node.models.chunks.num_drawn == 0
    assert not desk.memory.known


def test_many_adapters_pass_through_little_memory(desk: Desk) -> None:
    for request_id in range(1, MANY + 1):
        desk.submit(request_id, f"a{request_id}")
    for _ in range(20 * MANY):
        desk.look()
        desk.finish_reads()
        desk.node.step("m")
    assert not desk.failed
    assert not len(desk.served.scheduler.waiting) + desk.served.scheduler.adapters.num_waiting
    num_loaded = sum(isinstance(message, AdapterLoaded) for message in desk.sent)
    assert MANY <= num_loaded < 1.25 * MANY, "KV drives a few out before they are used"


def test_a_model_that_takes_none_says_so(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    desk.served.hosted.adapter_memory = None  # type: ignore[misc]
    assert desk.loads.why_not(desk.served) == "model m takes no adapters"


def test_one_that_is_loaded_ahead_is_there_for_its_first_request(desk: Desk) -> None:
    desk.loads.bring(desk.served, source("a"))
    desk.look()
    desk.look()
    assert [read.source.name for read in desk.reads] == ["a"]
    desk.finish_reads()
    desk.look()
    assert [(message.adapter, message.num_bytes) for message in desk.sent if isinstance(message, AdapterLoaded)] == [
        ("a", CHUNK_BYTES)
    ]
    assert not desk.loads.is_wanted(desk.served)
    desk.loads.bring(desk.served, source("a"))
    desk.submit(1, "a")
    assert not desk.served.scheduler.adapters.num_waiting
    desk.node.run("m")
    desk.loads.retire(desk.served, source("a"))
    assert not desk.memory.known
    assert desk.node.models.stats(1).adapters == {}
    desk.look()
    assert not desk.reads


def test_versions_of_an_adapter_that_are_in_memory_together_count_together(desk: Desk) -> None:
    """An adapter whose files were replaced stays, idle, beside the one that replaced it."""
    for fingerprint in ("old", "new"):
        desk.loads.bring(desk.served, AdapterSource("a", "/a", fingerprint))
        desk.look()
        desk.finish_reads()
        desk.look()
    stats = desk.node.models.stats(1)
    assert stats.adapters == {"m": {"a": 2 * CHUNK_BYTES}}
    assert stats.kv_chunks_used == 2


@pytest.mark.parametrize("how", ["broken", "no room", "hung", "retired"])
def test_one_that_cannot_be_loaded_ahead_is_given_up(desk: Desk, how: str) -> None:
    desk.memory.num_bytes["a"] = (17 if how == "no room" else 1) * CHUNK_BYTES
    desk.memory.error = CheckpointError("adapter_config.json", None, "no") if how == "broken" else None
    desk.loads.bring(desk.served, source("a"))
    desk.look()
    if how == "hung":
        desk.reads[0].is_prepared = True
        desk.now = adapter_loads.READ_LIMIT_S + 1
        desk.look()
        assert not desk.loads.is_wanted(desk.served)
    if how == "retired":
        desk.loads.retire(desk.served, source("a"))
    desk.finish_reads()
    desk.look()
    desk.look()
    assert not desk.loads.is_wanted(desk.served)
    assert not desk.loads.under_way
    assert not desk.failed
    assert not desk.memory.known
    assert not desk.served.scheduler.adapters.num_without_room
    desk.memory.error = None
    desk.memory.num_bytes["a"] = CHUNK_BYTES
    desk.submit(1, "a")
    desk.look()
    desk.finish_reads()
    desk.look()
    desk.node.run("m")
    assert not desk.failed


def test_a_request_for_one_that_is_loaded_ahead_waits_for_room_as_others_do(desk: Desk) -> None:
    desk.memory.num_bytes["big"] = 17 * CHUNK_BYTES
    desk.loads.bring(desk.served, source("big"))
    desk.submit(1, "big")
    desk.look()
    desk.finish_reads()
    desk.look()
    assert desk.served.scheduler.adapters.num_without_room == 1
    desk.node.models.set_lease(20)
    desk.look()
    assert not desk.loads.is_wanted(desk.served)
    assert desk.memory.known


def test_none_is_loaded_ahead_for_a_model_that_takes_none(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    desk.served.hosted.adapter_memory = None  # type: ignore[misc]
    desk.loads.bring(desk.served, source("a"))
    assert not desk.loads.is_wanted(desk.served)
