"""A stand-in for CUDA's graphs, which runs the captured step again, as a replay would, and for the parts of torch around them."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from engine.cuda import graphs
from engine.cuda.graph_room import GraphRoom
from engine.cuda.model import CudaModel

HANDLES = itertools.count()


class StandInGraph:
    """Stands in for torch's CUDAGraph: a replay runs the captured step again and writes to the same result. As with torch's
    allocator, a pool accepts no new graph once its last one is destroyed."""

    captured: ClassVar[list[StandInGraph]] = []
    alive: ClassVar[dict[Any, int]] = {}  # graphs of each pool
    ended_in: ClassVar[list[int]] = []  # the threads in which graphs were destroyed
    step: Any = None
    outputs: Any = None
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
            self.ended_in.append(threading.get_ident())

    def capture_end(self) -> None:
        """Ends the capture. The step that ran since capture_begin is the captured one."""

    def replay(self) -> None:
        again = self.step()
        self.outputs.drawn.copy_(again.drawn)
        self.outputs.hidden.copy_(again.hidden)
        for own, kept in zip(self.outputs.kept or (), again.kept or (), strict=True):
            own.copy_(kept)


@pytest.fixture
def stand_in_graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """Returns the stand-in for torch.cuda. num_emptied: how often torch was to give back what it keeps for later."""
    yield put_in(monkeypatch)
    StandInGraph.captured.clear()
    StandInGraph.ended_in.clear()


def put_in(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Has engine/cuda/graphs.py use the stand-in, and returns it."""
    cuda = SimpleNamespace(
        CUDAGraph=StandInGraph,
        Stream=SimpleNamespace,
        stream=lambda stream: nullcontext(),
        graph_pool_handle=lambda: (0, next(HANDLES)),
        memory_reserved=lambda: 0,
        num_emptied=0,
    )

    def empty_cache() -> None:
        cuda.num_emptied += 1

    cuda.empty_cache = empty_cache
    names = {name: getattr(torch, name) for name in ("zeros", "int32", "bfloat16", "mm")}
    monkeypatch.setattr(graphs, "torch", SimpleNamespace(cuda=cuda, **names))
    monkeypatch.setattr(graphs, "_space", None)
    monkeypatch.setattr(graphs, "_room", GraphRoom())
    return cuda


def remember_steps(model: CudaModel) -> None:
    """Gives each stand-in graph the step that was captured with it."""
    for graphs_of_kind in (model.graphs, model.mixed_graphs, model.adapted_graphs, model.adapted_mixed_graphs, model.edited_graphs):
        _remember(graphs_of_kind)


def _remember(graphs_of_kind: Any) -> None:
    step = graphs_of_kind._step

    def remembered(columns: Any) -> Any:
        outputs = step(columns)
        if StandInGraph.captured and StandInGraph.captured[-1].step is None:
            graph = StandInGraph.captured[-1]
            graph.step, graph.outputs = lambda: step(columns), outputs
        return outputs

    graphs_of_kind._step = remembered
