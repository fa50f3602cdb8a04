"""A GPU's load reads its weights while its kernels are compiled. It ends when both are done, and when it fails or is cancelled the
compilation ends with it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.contracts.loads import LoadCancelled
from engine.cuda.backend import CudaBackend
from engine.cuda.model import CudaModel
from engine.loading import kernel_wait
from engine.loading.runner import TorchRunner
from engine.protocol import Configure, LoadModel
from loader.errors import CheckpointError
from loader.models.catalog import scan_one
from loader.shapes.model_shape import ModelShape
from tests.engine.cuda_bench import INTERPRETED
from tests.engine.model_bench import BLOCK_TOKENS, CACHE_DIR, CASES, MAX_LEN, load_task, make_checkpoint, make_memory

pytest.importorskip("triton")
pytestmark = INTERPRETED


class Bench:
    """A runner of a GPU with one model. The kernels are compiled by `compiled`, given `waiting`. was_read: set once all weights
    were read. cancelled: cancels the load."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        make_checkpoint(folder, **CASES["llama"])
        self.memory = make_memory()
        size = (self.memory.num_chunks, self.memory.chunk_bytes, 64 << 20, 512)
        options = Configure("cpu:0", *size, BLOCK_TOKENS, 10.0, 1, cache_dir=CACHE_DIR)
        backend = CudaBackend(self.memory, options)
        self.runner = TorchRunner(backend, options)
        self.runner._kernels.result(60)
        backend._builds = self  # type: ignore[assignment]
        self.compiled: Callable[[Callable[[], None]], None] = lambda waiting: None
        self.was_read, self.cancelled = threading.Event(), threading.Event()
        self.fingerprint = scan_one(folder).fingerprint
        self.ended_by: BaseException | None = None

    def need(self, spec: LoadModel, shape: ModelShape, waiting: Callable[[], None]) -> None:
        try:
            self.compiled(waiting)
        except BaseException as error:
            self.ended_by = error
            raise

    def load(self) -> CudaModel:
        def progress(bytes_done: int, bytes_total: int) -> None:
            if 0 < bytes_total == bytes_done:
                self.was_read.set()

        spec = LoadModel(1, "m", str(self.folder), "float32", self.fingerprint, 1 << 20, 0, 0, MAX_LEN, 8, [1])
        try:
            model = self.runner.load(load_task(spec, progress, self.cancelled.is_set, self.memory))
        finally:
            assert not [thread for thread in threading.enumerate() if thread.name in ("compilation", "kernels")]
        assert isinstance(model, CudaModel)
        return model


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setattr(kernel_wait, "KERNEL_WAIT_EVERY_S", 0.01)
    monkeypatch.setattr(CudaModel, "warm", lambda model: None)
    return Bench(tmp_path)


def until_ended(waiting: Callable[[], None]) -> None:
    """Compiles for as long as the load lets it."""
    for _ in range(2000):
        threading.Event().wait(0.01)
        waiting()
    raise AssertionError("the compilation is not ended")


def test_weights_are_read_while_kernels_are_compiled(bench: Bench) -> None:
    def compiled(waiting: Callable[[], None]) -> None:
        assert bench.was_read.wait(20), "the load reads nothing before its kernels are compiled"
        waiting()

    bench.compiled = compiled
    bench.load().release()
    assert bench.ended_by is None


def test_the_model_is_made_once_kernels_are_compiled(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    def compiled(waiting: Callable[[], None]) -> None:
        assert bench.was_read.wait(20)
        threading.Event().wait(0.1)  # long enough for a load that does not wait
        order.append("compiled")

    bench.compiled = compiled
    monkeypatch.setattr(CudaModel, "warm", lambda model: order.append("launched"))
    bench.load().release()
    assert order == ["compiled", "launched"]


def test_a_read_that_fails_ends_the_compilation(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.compiled = until_ended

    def broken(*_: object, **__: object) -> None:
        raise CheckpointError("model.safetensors", None, "is torn")

    with monkeypatch.context() as patch:
        patch.setattr("engine.loading.runner.stream_weights", broken)
        with pytest.raises(CheckpointError, match="is torn"):
            bench.load()
    assert isinstance(bench.ended_by, LoadCancelled)
    bench.compiled = lambda waiting: None
    bench.load().release()


@pytest.mark.parametrize("when", ["at once", "once all is read"])
def test_a_cancelled_load_ends_both(bench: Bench, when: str) -> None:
    def compiled(waiting: Callable[[], None]) -> None:
        if when == "once all is read":
            assert bench.was_read.wait(20)
            bench.cancelled.set()
        until_ended(waiting)

    bench.compiled = compiled
    if when == "at once":
        bench.cancelled.set()
    with pytest.raises(LoadCancelled):
        bench.load()
    assert isinstance(bench.ended_by, LoadCancelled)
    bench.cancelled.clear()
    bench.compiled = lambda waiting: None
    bench.load().release()


def test_a_compilation_that_fails_fails_the_load(bench: Bench) -> None:
    def compiled(waiting: Callable[[], None]) -> None:
        raise RuntimeError("no compiler")

    bench.compiled = compiled
    with pytest.raises(RuntimeError, match="no compiler"):
        bench.load()
    bench.compiled = lambda waiting: None
    bench.load().release()
