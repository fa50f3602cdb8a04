"""Decode steps captured as graphs give the right tokens. A stand-in for a graph runs the captured step again, as a replay would."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from engine.cuda import graphs
from engine.cuda.graphs import graph_rows
from engine.cuda.model import CudaModel
from engine.protocol import SamplingParams
from scheduler.batch.plan import write_sampling
from tests.engine.cuda_bench import INTERPRETED, PROMPT, load_cuda_model
from tests.engine.model_bench import MAX_LEN, make_checkpoint, make_table, plan, put

pytest.importorskip("triton")
pytestmark = INTERPRETED

HANDLES = itertools.count()


class StandInGraph:
    """Stands in for torch's CUDAGraph: a replay runs the captured step again and writes to the same result. As with torch's
    allocator, a pool accepts no new graph once its last one is destroyed."""

    captured: ClassVar[list[StandInGraph]] = []
    alive: ClassVar[dict[Any, int]] = {}  # graphs of each pool
    step: Any = None
    drawn: Any = None
    pool: Any = None

    def capture_begin(self, pool: Any, capture_error_mode: str) -> None:
        assert capture_error_mode == "thread_local"
        assert self.alive.get(pool) != 0, "use_count > 0 INTERNAL ASSERT FAILED"
        self.alive[pool] = self.alive.get(pool, 0) + 1
        self.pool = pool
        StandInGraph.captured.append(self)

    def __del__(self) -> None:
        if self.pool is not None:
            self.alive[self.pool] -= 1

    def capture_end(self) -> None:
        """Ends the capture. The step that ran since capture_begin is the captured one."""

    def replay(self) -> None:
        self.drawn.copy_(self.step())


@pytest.fixture
def stand_in_graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    stream = SimpleNamespace(wait_stream=lambda other: None)
    cuda = SimpleNamespace(
        CUDAGraph=StandInGraph,
        Stream=lambda: stream,
        current_stream=lambda: stream,
        stream=lambda stream: nullcontext(),
        graph_pool_handle=lambda: (0, next(HANDLES)),
        memory_reserved=lambda: 0,
    )
    names = {"zeros": torch.zeros, "int32": torch.int32, "OutOfMemoryError": torch.OutOfMemoryError}
    monkeypatch.setattr(graphs, "torch", SimpleNamespace(cuda=cuda, **names))
    for name in ("_pool", "_stream", "_keeper"):
        monkeypatch.setattr(graphs, name, None)
    yield
    StandInGraph.captured.clear()


def remember_steps(model: CudaModel) -> None:
    """Gives each stand-in graph the step that was captured with it."""
    step = model.graphs._step

    def remembered(columns: Any) -> Any:
        drawn = step(columns)
        if StandInGraph.captured and StandInGraph.captured[-1].step is None:
            graph = StandInGraph.captured[-1]
            graph.step, graph.drawn = lambda: step(columns), drawn
        return drawn

    model.graphs._step = remembered


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


def test_a_step_without_memory_for_its_graph_runs_without_one(tmp_path: Path, stand_in_graphs: None) -> None:
    make_checkpoint(tmp_path, kind="qwen2", num_hidden_layers=1)
    plain = decoded(load_cuda_model(tmp_path), 3, 3)
    model = load_cuda_model(tmp_path, max_graph_rows=8)

    def refuse(columns: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.\nMore of it")

    model.graphs._step = refuse
    assert decoded(model, 3, 3) == plain
    assert not model.graphs.captured
    assert model.graphs.rows_for(3) == 0
    assert model.graphs.rows_for(1) == 1
    while model.num_uncaptured:
        model.capture_next()
    assert not model.graphs.captured


def test_nothing_is_captured_after_a_second_load(tmp_path: Path, stand_in_graphs: None) -> None:
    """The first load captures the requested sizes, idle time the rest, smallest first. A model that is loaded again still has them
    all."""
    make_checkpoint(tmp_path, kind="qwen2", num_hidden_layers=1)
    model = load_cuda_model(tmp_path, max_graph_rows=8)
    remember_steps(model)
    model.capture(3)  # the stand-in's capture computes, unlike a real one, so it is done before there are tokens to overwrite
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


def test_graph_row_counts_are_few_and_not_much_larger() -> None:
    sizes = [graph_rows(n) for n in range(1, 257)]
    assert all(n <= size <= 2 * n for n, size in enumerate(sizes, start=1))
    assert len(set(sizes)) < 24
    assert sizes[:8] == [1, 2, 4, 4, 8, 8, 8, 8]
