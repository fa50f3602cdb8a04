"""Nothing on the CUDA path races in random schedules, and each fault that was put right is found when it is put back."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from engine.contracts.steps import NoWorkSpace
from engine.cuda import adapters, backend, edited_graphs, expert_counts, frames, graphs, model, predicting, sequences, sink
from engine.cuda.graphs import WARM_UP_STEPS, CaptureSpace, StepGraph, StepGraphs
from engine.cuda.kernels import linear_choice
from engine.protocol import SamplingParams
from loader.sizes.gpu_sizing import CUBLAS_BYTES, LIBRARY_BYTES
from scheduler.batch.plan import BatchPlan, write_sampling
from tests.engine.cuda_stand_in import Refused
from tests.engine.races.device import TORCH
from tests.engine.races.engine_run import LENGTH, PREDICTS, EngineRun, Life, Stepping, run_of
from tests.engine.races.schedule import KeptEvent, Lock, Schedule, Stuck

NUM_SEEDS = 50  # of each version of torch
MOST_SEEDS = 100  # in which a fault that was put back is found
# A seed that finds a fault which few others do, by the name of what puts it back: it is tried before them, so that it need not be
# up to date. A change of the engine moves it.
FINDS = {
    "loads_capture": 17,
    "copies_outlive_their_errors": 31,
    "failed_steps_leave_their_masks_to_others": 7,
    "masks_are_unregistered_at_once": 8,
}


@pytest.mark.parametrize("seed", range(20))
def test_many_waits_with_limits_end_while_another_thread_turns(seed: int) -> None:
    """A connection that was broken is given up behind waits with limits, beside which other groups' threads wait and wait."""
    schedule = Schedule(seed)
    schedule.first.device = SimpleNamespace(prefix="")
    never = KeptEvent(schedule)

    def wait_often() -> None:
        for _ in range(20):
            assert not never.wait(1.0)

    threads = [schedule.thread(wait_often, name="late") for _ in range(5)]
    for thread in threads:
        thread.start()
    schedule.go_on_until(lambda: not any(thread.is_alive() for thread in threads), lambda: None)
    assert not schedule.errors
    waits = schedule.thread(lambda: schedule.wait(lambda: False, "what never comes") and None, name="stuck")
    waits.start()
    with pytest.raises(Stuck, match="stuck 6 waits for what never comes"):
        schedule.go_on_until(lambda: not waits.is_alive(), lambda: None)
    schedule.end_all()


@pytest.mark.parametrize("version", TORCH)
def test_nothing_races(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    counts, num_dropped = Counter[str](), 0
    for seed in range(NUM_SEEDS):
        run = run_of(seed, version, monkeypatch)
        assert run.faults == [], f"seed {seed}"
        counts.update(run.device.counts)
        num_dropped += run.num_replaced
    assert num_dropped > 10, "models loaded with other settings, whose graphs are given up"
    graphs_hold = ("replayed attention", "replayed a product", "replayed few rows", "replayed gather", "replayed experts")
    edited = ("widen", "count", "penalise", "sampling", "log-probabilities")
    graphs_hold += ("replayed widen", "replayed count", "replayed penalise", "replayed log-probabilities", "picked rows")
    for what in (
        "predictor",
        "comparison",
        "unpack",
        "adapters",
        "replayed adapters",
        *graphs_hold,
        *edited,
        "gather",
        "a copy from the device",
        "copy",
        "copy of masks",
        "unmapping",
        "unregistering",
    ):
        assert counts[what] > 30, what


def test_a_seed_is_one_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (run_of(3, "2.12", monkeypatch) for _ in range(2))
    assert first.device.counts == second.device.counts
    assert {stream.name: stream.clock for stream in first.device.streams} == {
        stream.name: stream.clock for stream in second.device.streams
    }


class LoadsInTurn(EngineRun):
    """A run that loads one model at a time, as the daemon has a device do."""

    def _start_load(self) -> None:
        if self.schedule.num_running == 0:
            super()._start_load()


def test_the_work_space_has_room_for_what_cublas_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs with all that multiplies keep as many work spaces as are reckoned with, and no more."""
    most = max(len(run_of(seed, "2.11", monkeypatch, kind=LoadsInTurn).device.work_spaces) for seed in range(12))
    assert most * CUBLAS_BYTES == LIBRARY_BYTES


class GoesOn(EngineRun):
    """A run in which most steps are those of sequences with penalties that go on, each read before the next one is launched."""

    reads_first = True
    _going_on: BatchPlan | None = None

    def _step_of(self, life: Life) -> None:
        if life.spec.model == PREDICTS or self._random.random() < 0.2:
            super()._step_of(life)
            return
        slots = np.arange(self._random.randint(1, 3), dtype=np.int32)
        life.table.adapter[slots], ones = -1, np.ones(len(slots), np.int32)
        for slot in slots.tolist():
            write_sampling(life.table, slot, SamplingParams(LENGTH, frequency_penalty=0.5), 1, LENGTH)
        for at in range(4):
            self._going_on = BatchPlan(1, life.spec.model, slots, ones * np.int32(4 + at), ones, ones > 0)
            super()._step_of(life)
            if self.reads_first:
                self._finish()
        self._going_on = None

    def _plan(self, life: Life, first_slot: int = 0, most_rows: int = 3) -> BatchPlan:
        return super()._plan(life, first_slot, most_rows) if self._going_on is None else self._going_on


class GoesOnUnread(GoesOn):
    reads_first = False


def test_kept_tokens_are_written_only_once_the_step_before_was_read(monkeypatch: pytest.MonkeyPatch) -> None:
    faults: list[str] = []
    for seed in range(20):
        assert run_of(seed, "2.13", monkeypatch, kind=GoesOn).faults == [], f"seed {seed}"
        faults += run_of(seed, "2.13", monkeypatch, kind=GoesOnUnread).faults
    assert any("writes page-locked memory that copy on default stream may still read" in fault for fault in faults), faults


# ---- faults put back


def warms_up_where_it_captures(run: EngineRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps run on the stream of captures before they are captured there, and the first graph multiplies nothing."""
    turn = Lock(run.schedule)

    def made(self: CaptureSpace, device: Any) -> None:
        cuda = graphs.torch.cuda
        self._pool, self._stream, self._first = cuda.graph_pool_handle(), cuda.Stream(), cuda.CUDAGraph()
        self._dropped = deque()
        word = graphs.torch.zeros(1, dtype=graphs.torch.int32, device=device)
        self._record(self._first, word.zero_)

    def captured(self: StepGraphs[Any], padding: Mapping[str, Any]) -> StepGraph:
        torch = graphs.torch
        inputs = torch.zeros(sum(-(-len(column) // 4) * 4 for column in padding.values()), dtype=torch.int32, device=self._device)
        static = self._staging.send(padding, inputs)
        with turn:
            space, current = graphs._capture_space(self._device), run.device.stream
            space._stream.wait_stream(current)
            with torch.cuda.stream(space._stream):
                for _ in range(WARM_UP_STEPS):
                    self._step(static)
            graph = torch.cuda.CUDAGraph()
            outputs = space._record(graph, lambda: self._step(static))
            current.wait_stream(space._stream)
        return StepGraph(graph, inputs, sequences.Padding(padding), outputs, 0.0, 0.0, 0)

    monkeypatch.setattr(CaptureSpace, "__init__", made)
    monkeypatch.setattr(StepGraphs, "_captured", captured)


def loads_capture(run: EngineRun, monkeypatch: pytest.MonkeyPatch) -> None:
    warms_up_where_it_captures(run, monkeypatch)
    warm = model.CudaModel.warm

    def warm_and_capture(self: model.CudaModel) -> None:
        warm(self)
        for num_rows in (1, 2):
            self.capture(num_rows)

    monkeypatch.setattr(model.CudaModel, "warm", warm_and_capture)
    monkeypatch.setattr(backend.CudaBackend, "_on_load_stream", lambda self: nullcontext())


def graphs_end_where_a_load_drops_them(run: EngineRun, monkeypatch: pytest.MonkeyPatch) -> None:
    warms_up_where_it_captures(run, monkeypatch)
    monkeypatch.setattr(StepGraphs, "drop", lambda self: self.captured.clear())


def loads_draw(run: EngineRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """The values that a load measures with come from the device's default generator, a few times for each size."""
    ours = linear_choice.launch_ours

    def drawn(x: Any, weight: Any, bias: Any, gelu: bool | None) -> None:
        for _ in range(8):
            graphs.torch.randn(len(x), device=weight.device)
            run.schedule.point()
        ours(x, weight, bias, gelu)

    monkeypatch.setattr(linear_choice, "launch_ours", drawn)


def compaction_does_not_wait(run: EngineRun, monkeypatch: pytest.MonkeyPatch) -> None:
    run.streams.finish_steps = lambda: None


def loads_do_not_wait(run: EngineRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """A load hands its model over, or unmaps its weights, while what it launched may still run."""
    monkeypatch.setattr(run.backend, "_on_load_stream", lambda: backend.torch.cuda.stream(run.backend._load_stream))


def maps_do_not_wait_for_unmapping(run: EngineRun, monkeypatch: pytest.MonkeyPatch) -> None:
    memory, hasty = run._memory, set[Any]()
    map_chunks, wait_for = memory.map, memory._unmapping.wait_for

    def hasty_map(address: int, chunks: Any) -> None:
        hasty.add(run.schedule.host)
        map_chunks(address, chunks)
        hasty.remove(run.schedule.host)

    memory.map = hasty_map
    memory._unmapping.wait_for = lambda *place: None if run.schedule.host in hasty else wait_for(*place)


def copies_outlive_their_errors(run: EngineRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy whose checksum finds no memory is not waited for."""
    summed, fence = run.streams.summed, run.copies.EventFence

    def failing(*arguments: Any) -> Any:
        with monkeypatch.context() as patches:
            patches.setattr(fence, "wait", lambda self: None)
            return summed(*arguments)

    run.streams.summed = failing


def sums_do_not_wait_for_copies(run: EngineRun, monkeypatch: pytest.MonkeyPatch) -> None:
    run.streams._sums.wait_event = lambda event: None


def steps_do_not_wait_for_staging(run: EngineRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host fills the one staging buffer again without waiting for the copy from it."""
    staging = model.Staging
    monkeypatch.setattr(staging.__init__, "__defaults__", (1,))
    copy = staging.copy

    def hasty(self: Any, *arguments: Any) -> Any:
        self._copied = [None] * len(self._copied)
        return copy(self, *arguments)

    monkeypatch.setattr(staging, "copy", hasty)


def drafts_do_not_wait_for_their_step(run: EngineRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """The predictor runs on a stream of its own, beside the step that it reads."""
    stream, after = graphs.torch.cuda.Stream(), predicting.CudaPredicting.after

    def beside(self: Any, *arguments: Any) -> Any:
        with graphs.torch.cuda.stream(stream):
            return after(self, *arguments)

    monkeypatch.setattr(predicting.CudaPredicting, "after", beside)


def edited_rows_do_not_wait_for_their_step(run: EngineRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph that samples edited rows is replayed on a stream of its own, beside the step whose states it goes on from."""
    stream, replay = graphs.torch.cuda.Stream(), edited_graphs.EditedGraphs.replay

    def beside(self: Any, *arguments: Any) -> Any:
        with graphs.torch.cuda.stream(stream):
            return replay(self, *arguments)

    monkeypatch.setattr(edited_graphs.EditedGraphs, "replay", beside)


def counts_are_read_at_once(run: EngineRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host reads what experts have computed while the copy of it may still be under way."""

    class Passed(run.copies.EventFence):  # type: ignore[misc, name-defined]
        def done(self) -> bool:
            return True

    monkeypatch.setattr(expert_counts, "EventFence", Passed)


class _Passed:
    """A fence that nobody waits for."""

    def wait(self) -> None:
        """Does nothing."""


def adapters_do_not_wait_for_their_copies(run: EngineRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """An adapter is entered into the tables while its matrices may still be on their way."""
    memory = run.backend.memory
    kept: list[Any] = []  # copies that nobody waits for

    def copy_in(address: int, data: Any) -> _Passed:
        kept.append(memory.copy_in(address, data))
        return _Passed()

    hasty: Any = SimpleNamespace(chunk_bytes=memory.chunk_bytes, arena=memory.arena, copy_in=copy_in)
    run.adapter_loads._memory = hasty


def adapters_do_not_wait_for_steps(run: EngineRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """An adapter is copied to chunks that a step under way may still read."""
    run.adapter_loads._await_steps = lambda: None


def adapters_make_their_tables_anew(run: EngineRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each adapter has the model's tables allocated again, while graphs hold the addresses of the old ones."""
    memory = adapters.DeviceAdapterMemory
    set_adapter = memory.set

    def anew(self: Any, *arguments: Any) -> None:
        of_gpu = {"dtype": adapters.torch.int64, "device": run._memory.arena.device}
        self._held = self._held._replace(places=adapters.torch.full(self.places.shape, -1, **of_gpu))
        set_adapter(self, *arguments)

    monkeypatch.setattr(memory, "set", anew)


def frames_are_decoded_beside_their_copies(run: EngineRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """A frame is decoded on the stream of loads, while the buffer that it is in may still be filled."""

    def beside(self: Any, data: Any, out: Any, verdict: Any, number: int) -> None:
        with self._lock:
            with self._memory.copying():
                self._memory.write(self._buffer.data_ptr(), data)
            with run.backend._on_load_stream():
                self._unpack(self._buffer, self._begin, 0, out, verdict, number)

    monkeypatch.setattr(frames.DeviceFrames, "decode", beside)


def slots_are_given_back_at_once(run: EngineRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader fills a slot again whose frame may still be on its way to the device."""
    monkeypatch.setattr(sink.DeviceSink, "fence", lambda self: _Passed())


def loads_do_not_wait_for_frames(run: EngineRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """A load makes its model while frames may still be decoded."""
    slots_are_given_back_at_once(run, monkeypatch)
    monkeypatch.setattr(sink.DeviceSink, "finish", lambda self: None)


def verdicts_are_read_beside_their_frames(run: EngineRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """A load asks on another stream than that of the frames whether one of them was refused."""
    slots_are_given_back_at_once(run, monkeypatch)
    monkeypatch.setattr(frames.DeviceFrames, "refused", lambda self, verdict: int(verdict.item()))


def masks_are_written_before_their_steps_end(run: EngineRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """A grammar's process learns of a step's tokens while the device may still copy the step's masks."""

    def hasty(self: Stepping) -> None:
        self.tell()
        self.launched.wait()

    monkeypatch.setattr(Stepping, "wait", hasty)


def failed_steps_leave_their_masks_to_others(run: EngineRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """The requests of a step that found no memory are failed while the device may still copy their masks."""

    def launch(self: model.CudaModel, *arguments: Any) -> Any:
        try:
            return self._launch(*arguments)
        except torch.OutOfMemoryError:
            raise NoWorkSpace from None

    monkeypatch.setattr(model.CudaModel, "launch", launch)


def masks_are_unregistered_at_once(run: EngineRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process's masks are unregistered as it ends, while the device may still copy some of them."""
    run.streams.steps_so_far = _Passed


WORK_SPACE = "cuBLAS's work space"
FAULTS: list[tuple[Callable[[EngineRun, pytest.MonkeyPatch], None], str, str]] = [
    (loads_capture, "2.11", f"on stream 4 writes {WORK_SPACE} that replayed a product on default stream may still write"),
    (graphs_end_where_a_load_drops_them, "2.12", f"replayed a product uses {WORK_SPACE} that was given back"),
    (loads_draw, "2.11", "Offset increment outside graph capture encountered unexpectedly."),
    (
        compaction_does_not_wait,
        "2.13",
        "a copy to the device on stream 0 writes a chunk that copy on default stream may still read",
    ),
    (loads_do_not_wait, "2.13", "giving it up on loop writes a chunk that a product on stream 3 may still read"),
    (loads_do_not_wait, "2.13", "writes a mapping that a product on stream 3 may still read"),
    (maps_do_not_wait_for_unmapping, "2.13", "writes a mapping that unmapping on"),
    (copies_outlive_their_errors, "2.13", "a chunk that a copy to the device on stream 0 may still write"),
    (sums_do_not_wait_for_copies, "2.11", "reads a chunk that a copy to the device on stream 0 may still write"),
    (steps_do_not_wait_for_staging, "2.13", "writes page-locked memory that copy on"),
    (drafts_do_not_wait_for_their_step, "2.13", "predictor on stream 4 reads"),
    (edited_rows_do_not_wait_for_their_step, "2.12", "picked rows on stream 4 reads"),
    (
        adapters_do_not_wait_for_their_copies,
        "2.13",
        "adapters on default stream reads a chunk that a copy to the device on stream 0 may still write",
    ),
    (
        adapters_do_not_wait_for_steps,
        "2.12",
        "a copy to the device on stream 0 writes a chunk that adapters on default stream may still read",
    ),
    (adapters_make_their_tables_anew, "2.11", "replayed adapters uses a tensor that was given back"),
    (frames_are_decoded_beside_their_copies, "2.13", "reads a tensor that a copy to the device on stream 0 may still write"),
    (slots_are_given_back_at_once, "2.13", "writes a slot that a copy to the device on stream 0 may still read"),
    (loads_do_not_wait_for_frames, "2.12", "on stream 3 reads a chunk that unpack on stream 0 may still write"),
    (verdicts_are_read_beside_their_frames, "2.11", "copy to the host on default stream reads a tensor that unpack on"),
    (
        masks_are_written_before_their_steps_end,
        "2.13",
        "writes a mask that copy of masks on default stream may still read",
    ),
    (
        failed_steps_leave_their_masks_to_others,
        "2.12",
        "writes a mask that copy of masks on default stream may still read",
    ),
    (masks_are_unregistered_at_once, "2.11", "writes a registration that copy of masks on default stream may still read"),
    (counts_are_read_at_once, "2.13", "the host on loop writes page-locked memory that copy on default stream may still write"),
]


@pytest.mark.parametrize(("put_back", "version", "fault"), FAULTS, ids=[fault[0].__name__ for fault in FAULTS])
def test_a_fault_put_back_is_found(
    put_back: Callable[[EngineRun, pytest.MonkeyPatch], None], version: str, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: dict[str, None] = {}
    for seed in dict.fromkeys((FINDS.get(put_back.__name__, 0), *range(MOST_SEEDS))):
        with suppress(Refused):  # in some schedules the driver's stand-in is the first to find the fault
            found |= dict.fromkeys(run_of(seed, version, monkeypatch, put_back).faults)
        if any(fault in text for text in found):
            return
    pytest.fail(f"not among {list(found)}")


@pytest.mark.parametrize(
    ("put_back", "version", "fault"),
    [
        (graphs_end_where_a_load_drops_them, "2.11", f"{WORK_SPACE} that was given back"),
        (loads_draw, "2.13", "Offset increment"),
    ],
)
def test_what_another_version_of_torch_does_is_no_fault(
    put_back: Callable[[EngineRun, pytest.MonkeyPatch], None], version: str, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch 2.11 keeps the work spaces of a graph that ends; 2.13 has a state of the generator for each capture."""
    for seed in range(20):
        assert not [text for text in run_of(seed, version, monkeypatch, put_back).faults if fault in text]
