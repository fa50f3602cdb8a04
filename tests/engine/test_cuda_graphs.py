"""Decode steps captured as graphs give the right tokens. A stand-in for a graph runs the captured step again, as a replay would."""

from __future__ import annotations

import gc
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.contracts.steps import NoWorkSpace
from engine.cuda import graphs
from engine.cuda.graphs import graph_rows
from engine.cuda.model import CudaModel
from engine.loop.idle_work import CAPTURE_AFTER_IDLE_S, IdleWork
from engine.protocol import SamplingParams
from scheduler.batch.plan import write_sampling
from tests.engine.cuda_bench import INTERPRETED, PROMPT, load_cuda_model
from tests.engine.model_bench import MAX_LEN, make_checkpoint, make_table, plan, put
from tests.engine.stand_in_graphs import StandInGraph, remember_steps, stand_in_graphs

__all__ = ["stand_in_graphs"]  # a fixture

pytest.importorskip("triton")
pytestmark = INTERPRETED


def decoded(model: CudaModel, rows: int, steps: int) -> list[list[int]]:
    """Returns the tokens of seeded and greedy rows, where each step takes the last tokens from the device alone."""
    table = make_table(groups=model.kv_groups)
    for slot in range(rows):
        put(table, slot, PROMPT[slot : slot + 5])
        write_sampling(table, slot, SamplingParams(max_tokens=90, temperature=0.8 * (slot % 2), top_p=0.9, seed=slot), 5, MAX_LEN)
    ids = [model.execute(plan(*((slot, 0, 5) for slot in range(rows))), table).ids.tolist()]
    ids += [model.execute(plan(*((slot, 5 + at, 1) for slot in range(rows))), table).ids.tolist() for at in range(steps)]
    return ids


def test_captured_steps_are_padded_steps_with_other_columns(tmp_path: Path, stand_in_graphs: None) -> None:
    """A replayed step reads its columns from where the captured one's were, and padding rows change nothing."""
    make_checkpoint(tmp_path, kind="qwen2", num_hidden_layers=1)
    plain = decoded(load_cuda_model(tmp_path), 3, 3)
    model = load_cuda_model(tmp_path, max_graph_rows=8)
    remember_steps(model)
    model.capture(3)
    assert list(model.graphs.captured) == [4]
    assert decoded(model, 3, 3) == plain
    assert list(model.graphs.captured) == [4]


REFUSALS = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.\nMore of it"),
    RuntimeError("CUDA error: out of memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
]


@pytest.mark.parametrize("error", REFUSALS, ids=["torch", "driver", "cublas"])
def test_a_step_without_memory_for_its_graph_runs_without_one(
    tmp_path: Path, stand_in_graphs: SimpleNamespace, error: RuntimeError
) -> None:
    make_checkpoint(tmp_path, kind="qwen2", num_hidden_layers=1)
    plain = decoded(load_cuda_model(tmp_path), 3, 3)
    model = load_cuda_model(tmp_path, max_graph_rows=8)

    def refuse(columns: Any) -> Any:
        raise error

    model.graphs._step = refuse
    assert decoded(model, 3, 3) == plain
    assert not model.graphs.captured
    assert model.graphs.rows_for(3) == 0
    assert model.graphs.rows_for(1) == 1
    while model.num_uncaptured:
        model.capture_next()
    assert not model.graphs.captured
    assert stand_in_graphs.num_emptied == 4, "once for each size"


def test_a_step_is_captured_when_its_graph_is_needed_for_the_second_time(tmp_path: Path, stand_in_graphs: None) -> None:
    """A capture takes as long as several steps, and a first token would wait for it."""
    make_checkpoint(tmp_path, kind="qwen2", num_hidden_layers=1)
    plain = decoded(load_cuda_model(tmp_path), 3, 3)
    model = load_cuda_model(tmp_path, max_graph_rows=8)
    remember_steps(model)
    assert decoded(model, 3, 1) == plain[:2]
    assert not model.graphs.captured
    assert decoded(model, 3, 3) == plain
    assert list(model.graphs.captured) == [4]


def test_other_errors_of_a_capture_are_not_taken_for_a_lack_of_memory(tmp_path: Path, stand_in_graphs: None) -> None:
    make_checkpoint(tmp_path, kind="qwen2", num_hidden_layers=1)
    model = load_cuda_model(tmp_path, max_graph_rows=8)

    def fail(columns: Any) -> Any:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    model.graphs._step = fail
    with pytest.raises(RuntimeError, match="illegal memory access"):
        model.capture(1)


def test_a_capture_is_tried_again_with_what_torch_gave_back(tmp_path: Path, stand_in_graphs: SimpleNamespace) -> None:
    """While a graph is captured torch keeps its free blocks, so that memory which is there is not found."""
    make_checkpoint(tmp_path, kind="qwen2", num_hidden_layers=1)
    model = load_cuda_model(tmp_path, max_graph_rows=8)
    step = model.graphs._step

    def fragmented(columns: Any) -> Any:
        if not stand_in_graphs.num_emptied:
            raise REFUSALS[0]
        return step(columns)

    model.graphs._step = fragmented
    assert model.capture(2) == 2
    assert list(model.graphs.captured) == [2]


def test_a_graph_that_the_driver_has_no_memory_to_make_is_refused_for_a_while(
    tmp_path: Path, stand_in_graphs: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch has the driver make a graph as its capture ends, and lets go of it as the object that holds it ends. The graph that
    holds the pool open may meet this, too."""
    make_checkpoint(tmp_path, kind="qwen2", num_hidden_layers=1)
    plain = decoded(load_cuda_model(tmp_path), 3, 3)
    model, now_s, num_ended, pools = load_cuda_model(tmp_path, max_graph_rows=4), 100.0, 0, set(StandInGraph.alive)
    remember_steps(model)
    monkeypatch.setattr(graphs.time, "monotonic", lambda: now_s)

    def end(graph: StandInGraph) -> None:
        nonlocal num_ended
        num_ended += 1
        if num_ended != 2:  # that of the pool, at the second attempt
            raise torch.AcceleratorError("CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation' in the documentation.")

    with monkeypatch.context() as patches:
        patches.setattr(StandInGraph, "capture_end", end)
        assert decoded(model, 3, 3) == plain
    assert (num_ended, stand_in_graphs.num_emptied, model.graphs.captured) == (3, 1, {})
    StandInGraph.captured.clear()
    gc.collect()
    assert [num for pool, num in StandInGraph.alive.items() if pool not in pools] == [0, 1], "the pool's own graph alone is left"
    now_s += graphs.RETRY_S
    assert decoded(model, 3, 3) == plain
    assert list(model.graphs.captured) == [4]


def test_a_capture_that_finds_no_memory_and_cannot_be_ended_is_refused(
    tmp_path: Path, stand_in_graphs: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call that fails within a capture may make it invalid, and the driver tells of that alone as the capture ends."""
    make_checkpoint(tmp_path, kind="qwen2", num_hidden_layers=1)
    model = load_cuda_model(tmp_path, max_graph_rows=8)
    assert model.capture(1) == 1
    step, begin, is_capturing = model.graphs._step, StandInGraph.capture_begin, False

    def begins(graph: StandInGraph, pool: Any, capture_error_mode: str) -> None:
        nonlocal is_capturing
        begin(graph, pool, capture_error_mode)
        is_capturing = True

    def refuse(columns: Any) -> Any:
        if is_capturing:
            raise REFUSALS[1]
        return step(columns)

    def end(graph: StandInGraph) -> None:
        nonlocal is_capturing
        is_capturing = False
        raise torch.AcceleratorError("CUDA error: operation failed due to a previous error during capture")

    model.graphs._step = refuse
    monkeypatch.setattr(StandInGraph, "capture_begin", begins)
    monkeypatch.setattr(StandInGraph, "capture_end", end)
    assert model.capture(4) == 0
    assert model.graphs.is_refused(4)


def test_a_graph_that_finds_no_memory_as_it_is_replayed_fails_one_step(
    tmp_path: Path, stand_in_graphs: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint(tmp_path, kind="qwen2", num_hidden_layers=1)
    plain = decoded(load_cuda_model(tmp_path), 3, 1)
    model = load_cuda_model(tmp_path, max_graph_rows=8)
    remember_steps(model)
    assert model.capture(4) == 4

    def refuse(graph: StandInGraph) -> None:
        raise REFUSALS[1]

    monkeypatch.setattr(StandInGraph, "replay", refuse)
    with pytest.raises(NoWorkSpace, match="out of memory"):
        decoded(model, 3, 1)
    assert not model.graphs.captured
    assert decoded(model, 3, 1) == plain


def test_a_refused_graph_is_tried_again_later(
    tmp_path: Path, stand_in_graphs: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph that found no memory is tried again after a minute, then after two, and so on, at most after an hour."""
    make_checkpoint(tmp_path, kind="qwen2", num_hidden_layers=1)
    model, now_s = load_cuda_model(tmp_path, max_graph_rows=8), 100.0
    monkeypatch.setattr(graphs.time, "monotonic", lambda: now_s)
    step = model.graphs._step

    def refuse(columns: Any) -> Any:
        raise REFUSALS[0]

    model.graphs._step = refuse
    waits = []
    for _ in range(9):
        assert model.capture(4) == 0
        until_s = model.graphs._refused[4].until_s
        waits.append(until_s - now_s)
        now_s = until_s - 1.0
        assert 4 not in model.graphs.missing(8)
        now_s = until_s
        assert 4 in model.graphs.missing(8)
    assert waits == [60, 120, 240, 480, 960, 1920, 3600, 3600, 3600]
    model.graphs._step = step
    assert model.capture(4) == 4


def test_one_thread_captures_and_lets_go_of_graphs(tmp_path: Path, stand_in_graphs: None) -> None:
    make_checkpoint(tmp_path, kind="qwen2", num_hidden_layers=1)
    model, other = load_cuda_model(tmp_path, max_graph_rows=8), load_cuda_model(tmp_path, max_graph_rows=8)
    model.capture(3)
    gc.collect()
    StandInGraph.ended_in.clear()
    errors: list[str] = []

    def elsewhere() -> None:
        try:
            other.capture(3)
        except RuntimeError as error:
            errors.append(str(error))
        model.graphs.drop()
        gc.collect()

    load = threading.Thread(target=elsewhere)
    load.start()
    load.join()
    assert errors == ["a graph is captured in another thread than the one that replays it"]
    StandInGraph.captured.clear()
    assert (model.graphs.captured, StandInGraph.ended_in) == ({}, [])
    other.capture(3)
    gc.collect()
    assert StandInGraph.ended_in == [threading.get_ident()]


def test_trials_come_last_and_one_comparison_in_an_idle_turn(tmp_path: Path, stand_in_graphs: None) -> None:
    """The loop looks for messages between two turns, so a request that comes waits for one comparison at most."""
    make_checkpoint(tmp_path, kind="qwen2", num_hidden_layers=1)
    model = load_cuda_model(tmp_path, max_graph_rows=2)
    remember_steps(model)
    compared = []

    class Trials:
        def __init__(self, name: str, num_open: int) -> None:
            self.name, self.num_open = name, num_open

        def measure_next(self) -> None:
            compared.append((self.name, list(model.graphs.captured)))
            self.num_open -= 1

    model.trials = [Trials("tiles", 2), Trials("overlap", 1)]
    models: Any = SimpleNamespace(uncaptured=lambda: model, capture_next=model.capture_next)
    journal: Any = SimpleNamespace(beat=lambda doing: None)
    none: Any = None
    idle = IdleWork(models, none, none, none, journal)
    assert model.num_uncaptured == 5
    for left in (4, 3, 2, 1, 0):
        assert idle.wait_s(0) == CAPTURE_AFTER_IDLE_S
        idle.step(0)
        assert model.num_uncaptured == left
    model.capture_next()  # does nothing more
    assert compared == [("tiles", [1, 2])] * 2 + [("overlap", [1, 2])]
    model.trials = [Trials("tiles", 3)]
    model.release()
    assert model.num_uncaptured == 0


def test_nothing_is_captured_after_a_second_load(tmp_path: Path, stand_in_graphs: None) -> None:
    """The first load captures the requested sizes, idle time the rest, smallest first. A model that is loaded again still has them
    all."""
    make_checkpoint(tmp_path, kind="qwen2", num_hidden_layers=1)
    model = load_cuda_model(tmp_path, max_graph_rows=8)
    remember_steps(model)
    model.capture(3)
    first = decoded(model, 3, 2)
    order = []
    while model.num_uncaptured:
        model.capture_next()
        order.append(list(model.graphs.captured)[-1])
    assert (next(iter(model.graphs.captured)), order) == (4, [1, 2, 8])
    num_captured = len(StandInGraph.captured)
    kept = model._weights.memory.clone()
    model.release()
    assert model.num_uncaptured == 0, "an evicted model has no weights to capture with"
    model._weights.memory.zero_()
    model._weights.memory.copy_(kept)
    model.restore()
    assert decoded(model, 3, 2) == first
    decoded(model, 7, 1)
    assert (len(StandInGraph.captured), model.num_uncaptured) == (num_captured, 0)


def test_graphs_are_captured_when_all_before_them_are_gone(tmp_path: Path, stand_in_graphs: None) -> None:
    make_checkpoint(tmp_path, kind="qwen2", num_hidden_layers=1)
    model = load_cuda_model(tmp_path, max_graph_rows=8)
    remember_steps(model)
    model.capture(3)
    model.graphs.captured.clear()
    StandInGraph.captured.clear()
    gc.collect()
    model.capture(3)
    assert list(model.graphs.captured) == [4]


def test_other_work_is_captured_as_steps_are(stand_in_graphs: None) -> None:
    done: list[int] = []
    graph = graphs.captured(torch.device("cpu"), lambda: done.append(1))
    assert done == [1]
    assert StandInGraph.captured[1:] == [graph], "after the one that keeps the pool open"


def test_graph_row_counts_are_few_and_not_much_larger() -> None:
    sizes = [graph_rows(n) for n in range(1, 257)]
    assert all(n <= size <= 2 * n for n, size in enumerate(sizes, start=1))
    assert len(set(sizes)) < 24
    assert sizes[:8] == [1, 2, 4, 4, 8, 8, 8, 8]
