"""The graphs of all models of a GPU together, and what evicted models keep for their return, are bounded."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

pytest.importorskip("triton")

from engine.cuda import backend, graph_room, graphs
from engine.cuda.backend import CudaBackend
from engine.cuda.graph_room import RESTING_S, GraphRoom
from engine.cuda.graphs import DecodeGraphs, StepGraph, StepOutputs
from engine.cuda.kept_models import KeptModels
from engine.cuda.model import CudaModel
from engine.cuda.sequences import Padding
from engine.loading.runner import TorchRunner
from engine.protocol import Configure, LoadModel
from loader.models.catalog import scan_one
from tests.engine.cuda_bench import INTERPRETED
from tests.engine.model_bench import BLOCK_TOKENS, CACHE_DIR, MAX_LEN, load_task, make_checkpoint, make_memory
from tests.engine.stand_in_graphs import StandInGraph, stand_in_graphs

__all__ = ["stand_in_graphs"]  # a fixture
pytestmark = INTERPRETED
GRAPHS_A_MODEL = 4  # of decode steps of up to 8 rows: 1, 2, 4 and 8


class Recorded(DecodeGraphs):
    """Graphs of up to 8 rows whose capture computes nothing."""

    def __init__(self, room: GraphRoom) -> None:
        step: Any = None
        super().__init__(step, step, torch.device("cpu"), 8, room=room)
        self.refuses = lambda: False

    def capture(self, size: int, padding: Any = None) -> bool:
        return super().capture(size, padding)

    def _captured(self, padding: Any) -> StepGraph:
        if self.refuses():
            raise torch.OutOfMemoryError("CUDA out of memory.")
        nothing = torch.empty(0)
        return StepGraph(StandInGraph(), nothing, Padding({}), StepOutputs(nothing, nothing), 0.0, 0.0, 0)

    def capture_all(self) -> None:
        while missing := self.missing(8):
            self.capture(missing[0])


def test_an_evicted_model_gives_its_graphs_to_one_that_needs_the_room(stand_in_graphs: SimpleNamespace) -> None:
    """The longest evicted first. Without an evicted one idle time captures nothing."""
    room = GraphRoom(2 * GRAPHS_A_MODEL)
    first, second, third = (Recorded(room) for _ in range(3))
    first.capture_all()
    second.capture_all()
    assert third.missing(8) == []
    first.evicted_s, second.evicted_s = 2.0, 1.0
    third.capture_all()
    assert [len(each.captured) for each in (first, second, third)] == [4, 0, 4]
    assert second.missing(8) != [], "those of the other one, evicted later"
    second.evicted_s = first.evicted_s = None
    assert second.missing(8) == []
    del first
    gc.collect()
    assert len(second.missing(8)) == 4


def test_a_step_gets_the_place_of_a_graph_that_no_step_runs(
    stand_in_graphs: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that no step has ever run is given up first, then the one that has rested the longest, at least a minute."""
    now_s = 1000.0
    monkeypatch.setattr(graph_room, "time", SimpleNamespace(monotonic=lambda: now_s))
    room = GraphRoom(GRAPHS_A_MODEL)
    first, second = Recorded(room), Recorded(room)
    first.capture_all()
    for size, used_s in ((1, 990.0), (4, now_s - RESTING_S - 2), (8, now_s - RESTING_S - 1)):
        first.captured[size].used_s = used_s
    for size, left in ((2, [1, 4, 8]), (4, [1, 8]), (8, [1])):
        assert room.is_free_for_a_step()
        assert second.capture(size)
        second.captured[size].used_s = now_s
        assert (sorted(first.captured), room.num_graphs) == (left, GRAPHS_A_MODEL)
    assert not room.is_free_for_a_step()
    assert not second.capture(1)
    assert not second.is_refused(1), "there may be room at the next step"
    now_s += RESTING_S + 60
    assert room.is_free_for_a_step()
    assert second.capture(1)
    assert not first.captured
    assert not first.lacked_before(1), "a graph that was given up is captured anew when two steps have lacked it"


def test_evicted_models_give_up_their_graphs_where_memory_is_short(stand_in_graphs: SimpleNamespace) -> None:
    room = GraphRoom()
    evicted, served, own = (Recorded(room) for _ in range(3))
    evicted.capture_all()
    served.capture_all()
    evicted.evicted_s = 1.0
    own.refuses = lambda: bool(evicted.captured)
    assert own.capture(2)
    assert (len(evicted.captured), len(served.captured), list(own.captured)) == (0, 4, [2])
    assert stand_in_graphs.num_emptied == 2, "before and after"


class Rotation:
    """A device on which models are loaded one after the other: each captures all its graphs and is evicted before the next."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        make_checkpoint(folder, kind="qwen2", num_hidden_layers=1)
        self.memory = make_memory()
        place = ("cpu:0", self.memory.num_chunks, self.memory.chunk_bytes)
        options = Configure(*place, 64 << 20, 512, BLOCK_TOKENS, 10.0, 1, cache_dir=CACHE_DIR)
        monkeypatch.setattr(backend, "CudaModel", lambda *of, **more: CudaModel(*of, **(more | {"max_graph_rows": 8})))
        monkeypatch.setattr(CudaModel, "warm", lambda self: None)
        self.device = CudaBackend(self.memory, options)
        self.runner = TorchRunner(self.device, options)
        self.spec = LoadModel(1, "", str(folder), "float32", scan_one(folder).fingerprint, 1 << 20, 0, 0, MAX_LEN, 8, [1])

    def load(self, name: str) -> CudaModel:
        model = self.runner.load(load_task(msgspec.structs.replace(self.spec, model=name), memory=self.memory))
        assert isinstance(model, CudaModel)
        while model.num_uncaptured:
            model.capture_next()
        return model


def test_models_that_come_and_go_keep_a_bounded_number_of_graphs(
    tmp_path: Path, stand_in_graphs: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = GraphRoom(3 * GRAPHS_A_MODEL)
    monkeypatch.setattr(graphs, "_room", room)
    rotation = Rotation(tmp_path, monkeypatch)
    for number in range(12):
        model = rotation.load(f"m{number}")
        assert len(model.graphs.captured) == GRAPHS_A_MODEL
        assert room.num_graphs <= 3 * GRAPHS_A_MODEL
        model.release()
    graphs.destroy_dropped()
    StandInGraph.captured.clear()
    gc.collect()
    assert graphs._space is not None
    num_alive = StandInGraph.alive[graphs._space._pool]
    assert num_alive == 1 + 3 * GRAPHS_A_MODEL, "and the one that holds the pool open"
    rotation.memory.close()


def test_models_that_come_and_go_keep_a_bounded_part_of_the_device(
    tmp_path: Path, stand_in_graphs: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that were evicted last are kept, with all their graphs; of the others nothing is."""
    rotation = Rotation(tmp_path, monkeypatch)
    first = rotation.load("first")
    kept_bytes = first.kept_bytes
    assert kept_bytes > sum(table.nbytes for table in first._sequences.tables) > 0
    first.release()
    monkeypatch.setattr(rotation.device, "_kept", KeptModels(2 * kept_bytes))
    models = []
    for number in range(12):
        models.append(weakref.ref(model := rotation.load(f"m{number}")))
        model.release()
        del model
    gc.collect()
    assert [number for number, model in enumerate(models) if model() is not None] == [9, 10, 11], "the last has made no room yet"
    StandInGraph.captured.clear()
    last = rotation.load("m11")
    assert (last, StandInGraph.captured) == (models[11](), [])
    rotation.load("m3")
    gc.collect()
    assert models[3]() is None
    assert len(StandInGraph.captured) == GRAPHS_A_MODEL
    rotation.memory.close()


def test_a_load_without_memory_gets_what_evicted_models_keep(
    tmp_path: Path, stand_in_graphs: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    rotation = Rotation(tmp_path, monkeypatch)
    evicted = weakref.ref(model := rotation.load("evicted"))
    model.release()
    del model
    served = rotation.load("served")

    def warm(model: CudaModel) -> None:
        gc.collect()
        if evicted() is not None:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(CudaModel, "warm", warm)
    monkeypatch.setattr(backend, "give_back_memory", lambda: None)
    rotation.load("own")
    assert len(served.graphs.captured) == GRAPHS_A_MODEL
    rotation.memory.close()
