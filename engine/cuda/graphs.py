"""Captures steps as CUDA graphs, one for each of a few sizes of steps, all in one memory pool. This file has what all graphs need
(capture, memory, and what happens without memory) and the graphs of decode steps, whose sizes are row counts; mixed_graphs.py has
the graphs of steps with prompt chunks.

A graph holds addresses: of the weights (which return to the same range after an eviction), of the KV arena, of the state of the
model's sequences, and of its own input columns (arrays with the inputs of a step). Graphs that share a pool must not run at the
same time, so all steps of a device run on one stream, and one thread launches them. The same thread captures and destroys graphs
(docs/gpu.md says why).

Shapes: R rows, padding included; T tokens; W width.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from engine.cuda.graph_room import GraphRoom
from engine.cuda.sequences import Padding, Staging, words_of
from engine.memory.out_of_memory import lacks_memory

log = logging.getLogger("engine")

Size = TypeVar("Size", bound=Hashable)
Result = TypeVar("Result")

WARM_UP_STEPS = 2  # steps before a capture, in which kernels are compiled and libraries allocate memory that they keep
RETRY_S = 60.0  # time after which a graph that found no memory is tried again; doubles with each further refusal
LONGEST_RETRY_S = 3600.0

_recording = threading.Lock()  # held while a graph is captured


def give_back_memory() -> None:
    """Makes torch return its cached free memory to the driver. Torch does so by itself if an allocation fails otherwise, but not
    while any thread captures a graph. May be called from any thread."""
    with _recording:
        torch.cuda.empty_cache()


def graph_rows(num_rows: int) -> int:
    """Returns the row count of the graph that runs a step of num_rows rows, whose other rows are padding. Row counts of graphs are
    1, 2, 4, then multiples of 8 up to 64, of 16 up to 128, and of 32 above."""
    if num_rows <= 4:
        return 1 << (num_rows - 1).bit_length()
    step = 8 if num_rows <= 64 else 16 if num_rows <= 128 else 32
    return -(-num_rows // step) * step


@dataclass(slots=True)
class StepOutputs:
    """The results of a step on the device.

    drawn [2, R] int32: the sampled ids, and 1 for each row whose logits were not finite.
    hidden [R, W]: the hidden states from which the rows were sampled; rows with edited logits or log-probabilities are sampled from
    them afterwards.
    kept: tensors [>= T, W] with states that the model's predictor (which drafts tokens) reads, for the T tokens of the step; None:
    there is no predictor."""

    drawn: Tensor
    hidden: Tensor
    kept: list[Tensor] | None = None


@dataclass(slots=True)
class StepGraph:
    """A captured step.

    padding: the columns (input arrays) of a step that is padding only, used where a real step's columns are missing or shorter.
    outputs: the memory to which the graph writes its results.
    launch_s: seconds that the host took to launch the same step without a graph. capture_s: seconds that the capture took.
    num_bytes: bytes by which the capture made the memory pool grow.
    used_s: the time.monotonic() at which a step last ran the graph; -inf: none has."""

    graph: Any
    inputs: Tensor  # int32: all columns, as Staging.send lays them out
    padding: Padding
    outputs: StepOutputs
    launch_s: float
    capture_s: float
    num_bytes: int
    used_s: float = -math.inf

    @property
    def kept_bytes(self) -> int:
        """Returns the bytes of the graph's input columns and results, which stay allocated from one run to the next."""
        results = (self.outputs.drawn, self.outputs.hidden)
        return self.inputs.nbytes + sum(result.nbytes for result in results)


class CaptureSpace:
    """Captures all graphs of this process, in one memory pool, on one stream, and in the thread that made this object.

    On that stream work is only recorded, never executed. cuBLAS has a work space for each stream, whose address graphs hold, so all
    graphs share the work space of this stream. Only replays write to it, and they run one after the other.

    The first graph is never replayed and never dropped. It keeps the pool open, since torch refuses a pool whose last graph is
    gone. It is the first to launch a matrix multiplication on the stream, so the stream's work space is taken from the pool.

    With torch >= 2.12 dropping a graph frees the stream's work space, although other graphs write to it (pytorch#193402). These
    graphs then write to free memory of the pool. That is harmless, because only replays use the pool, and nothing in its free
    memory has to last from one replay to the next."""

    def __init__(self, device: torch.device) -> None:
        self._thread = threading.get_ident()
        self._pool, self._stream, self._first = torch.cuda.graph_pool_handle(), torch.cuda.Stream(), torch.cuda.CUDAGraph()
        self._dropped: deque[StepGraph] = deque()
        square = torch.zeros(16, 16, dtype=torch.bfloat16, device=device)
        torch.mm(square, square)  # creates the thread's cuBLAS handle, which must not happen within a capture
        self._record(self._first, lambda: torch.mm(square, square))

    def capture(self, work: Callable[[], Result]) -> tuple[Any, Result, int]:
        """Captures everything that `work` launches. Returns the graph, the result of `work`, and the number of bytes by which the
        memory pool grew. Raises RuntimeError if called in another thread than the one that made this object."""
        if threading.get_ident() != self._thread:
            raise RuntimeError("a graph is captured in another thread than the one that replays it")
        self.destroy_dropped()
        graph, reserved_bytes = torch.cuda.CUDAGraph(), torch.cuda.memory_reserved()
        result = self._record(graph, work)
        return graph, result, torch.cuda.memory_reserved() - reserved_bytes

    def drop(self, graphs: list[StepGraph]) -> None:
        """Adds graphs that will not be replayed any more to those that are destroyed before the next capture. May be called in any
        thread."""
        self._dropped.extend(graphs)

    def destroy_dropped(self) -> None:
        """Destroys the graphs that were passed to `drop`. Called by the thread that captures."""
        self._dropped.clear()

    def _record(self, graph: Any, work: Callable[[], Result]) -> Result:
        with _recording, torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")  # other threads load and copy meanwhile
            try:
                result = work()
            except BaseException:
                with suppress(RuntimeError):  # that an error has made the capture invalid; the error itself tells why
                    graph.capture_end()
                raise
            graph.capture_end()
            return result


_space: CaptureSpace | None = None
_room = GraphRoom()


def _capture_space(device: torch.device) -> CaptureSpace:
    global _space
    if _space is None:
        _space = CaptureSpace(device)
    return _space


def captured(device: torch.device, work: Callable[[], None]) -> Any:
    """Captures what `work` launches in the way in which steps are captured, and returns the graph."""
    graph, _, _ = _capture_space(device).capture(work)
    return graph


@dataclass(slots=True, frozen=True)
class _Refusal:
    """The record that there was no memory to capture the graph of a step size. The capture may be tried again at until_s (by
    time.monotonic()), wait_s after the failed attempt."""

    until_s: float
    wait_s: float


class StepGraphs(Generic[Size]):
    """The CUDA graphs of one model's steps of one kind, by size.

    step: the function that is captured; it computes a step's outputs from its input columns on the device.
    staging: copies columns to the device.
    warming: returns the context in which steps are run as a warm-up before a capture.
    room: bounds the number of graphs of all models; None: the process's own GraphRoom.
    replaying: returns the context in which a graph is replayed; it is entered after the copy of the columns was launched."""

    def __init__(
        self,
        step: Callable[[dict[str, Tensor]], StepOutputs],
        staging: Staging,
        device: torch.device,
        warming: Callable[[], AbstractContextManager[None]] = nullcontext,
        room: GraphRoom | None = None,
        replaying: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._step, self._staging, self._device, self._warming, self._replaying = step, staging, device, warming, replaying
        self.captured: dict[Size, StepGraph] = {}
        self.evicted_s: float | None = None  # when the model was evicted, by time.monotonic(); None: it is not
        self._refused: dict[Size, _Refusal] = {}
        self._room = _room if room is None else room

    @property
    def kept_bytes(self) -> int:
        """Returns the bytes that the input columns and results of all graphs take."""
        return sum(graph.kept_bytes for graph in list(self.captured.values()))

    def is_refused(self, size: Size) -> bool:
        """Returns whether the capture of this size failed for lack of memory so recently that it is not to be tried again yet."""
        refusal = self._refused.get(size)
        return refusal is not None and time.monotonic() < refusal.until_s

    def run(self, size: Size, columns: Mapping[str, Any]) -> StepOutputs:
        """Replays the captured graph of this size, and returns the step's outputs, in memory that the next replay of any graph
        overwrites. columns: the inputs of the step, without padding."""
        self._started(size, columns)
        graph = self.captured[size]
        with self._replaying():
            self._replay(size, graph)
        return graph.outputs

    def _replay(self, size: Size, graph: StepGraph) -> None:
        """Replays a captured graph. If the driver has no memory for that, drops the graph and refuses its size for a while, so that
        only this step fails."""
        try:
            graph.graph.replay()
        except RuntimeError as error:
            if lacks_memory(error):
                self.drop_size(size)
                self._refuse(size, error)
            raise

    def _started(self, size: Size, columns: Mapping[str, Any]) -> Tensor:
        """Launches the copy of a step's input columns to the inputs of the graph of this size, and returns the memory of these
        inputs."""
        graph = self.captured[size]
        graph.used_s = time.monotonic()
        self._staging.copy(columns, graph.inputs, graph.padding)
        return graph.inputs

    def capture(self, size: Size, padding: Mapping[str, Any]) -> bool:
        """Captures the graph for steps of this size, which must not be refused (is_refused). padding: the columns of a step of this
        size that is padding only. Returns whether there is a graph now. It is False if other models' graphs leave no room, or if
        there is no memory even after evicted models have lost their graphs. If there is no memory, the size is refused for a
        while."""
        if not self._room.make(self):
            return False
        for give_back in (None, give_back_memory, self._give_back_of_evicted):
            if give_back is not None and give_back() is False:
                break
            try:
                self.captured[size] = self._captured(padding)
            except RuntimeError as error:
                if not lacks_memory(error):
                    raise
                why = str(error)
            else:
                self._refused.pop(size, None)
                return True
        self._refuse(size, why)
        return False

    def _refuse(self, size: Size, why: object) -> None:
        """Records that there was no memory for the graph of this size, which is not to be captured for a while. why: the error."""
        before = self._refused.get(size)
        wait_s = RETRY_S if before is None else min(2 * before.wait_s, LONGEST_RETRY_S)
        self._refused[size] = _Refusal(time.monotonic() + wait_s, wait_s)
        log.warning("steps of %s have no graph for %.0f s: %s", self._named(size), wait_s, str(why).partition("\n")[0])

    def drop(self) -> None:
        """Drops all graphs of this model and kind of step. May be called in any thread."""
        let_go(list(self.captured.values()))
        self.captured.clear()

    def drop_size(self, size: Size) -> None:
        """Drops the graph for steps of this size, if there is one."""
        if (graph := self.captured.pop(size, None)) is not None:
            let_go([graph])

    def _give_back_of_evicted(self) -> bool:
        """Drops the graphs of evicted models, and makes torch return their memory to the driver. Returns False if no evicted model
        had graphs."""
        if not self._room.drop_evicted():
            return False
        destroy_dropped()
        give_back_memory()
        return True

    def _named(self, size: Size) -> str:
        return f"size {size}"

    def _captured(self, padding: Mapping[str, Any]) -> StepGraph:
        began_s = time.perf_counter()
        inputs, static = self._fixed_inputs(padding)
        space = _capture_space(self._device)
        launch_s = math.inf
        with self._warming():
            for _ in range(WARM_UP_STEPS):  # on the stream of steps
                launched_s = time.perf_counter()
                self._step(static)
                launch_s = min(launch_s, time.perf_counter() - launched_s)
        graph, outputs, num_bytes = space.capture(lambda: self._step(static))
        return StepGraph(graph, inputs, Padding(padding), outputs, launch_s, time.perf_counter() - began_s, num_bytes)

    def _fixed_inputs(self, padding: Mapping[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
        """Allocates the memory of a graph's inputs and copies `padding` to it. Returns the memory, and the columns as views of the
        memory."""
        inputs = torch.zeros(words_of(padding), dtype=torch.int32, device=self._device)
        return inputs, self._staging.send(padding, inputs)


def let_go(graphs: list[StepGraph]) -> None:
    """Passes graphs that will not be replayed any more to the CaptureSpace, which destroys them later. May be called in any
    thread."""
    if _space is not None:
        _space.drop(graphs)


def destroy_dropped() -> None:
    """Destroys the graphs that were passed to let_go. Called by the thread that captures."""
    if _space is not None:
        _space.destroy_dropped()


class DecodeGraphs(StepGraphs[int]):
    """The CUDA graphs of one model's decode steps, by row count. max_rows: steps of more rows have no graph; 0: no step has one."""

    def __init__(
        self,
        step: Callable[[dict[str, Tensor]], StepOutputs],
        staging: Staging,
        device: torch.device,
        max_rows: int,
        warming: Callable[[], AbstractContextManager[None]] = nullcontext,
        room: GraphRoom | None = None,
        replaying: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        super().__init__(step, staging, device, warming, room, replaying)
        self._max_rows = max_rows
        self._lacked: set[int] = set()

    def lacked_before(self, rows: int) -> bool:
        """Records that a step lacked the graph of this row count, and returns whether an earlier step lacked it, too."""
        if rows in self._lacked:
            return True
        self._lacked.add(rows)
        return False

    def drop_size(self, size: int) -> None:
        super().drop_size(size)
        self._lacked.discard(size)

    def rows_for(self, num_rows: int) -> int:
        """Returns the row count of the graph for a step of num_rows rows; the graph need not be captured yet. Returns 0 if the step
        has too many rows for a graph, or if the graph's capture failed for lack of memory a short while ago."""
        rows = graph_rows(num_rows)
        return rows if rows <= self._max_rows and not self.is_refused(rows) else 0

    def missing(self, max_rows: int) -> list[int]:
        """Returns the row counts, the smallest first, of the graphs that are still to be captured for steps of up to max_rows rows.
        Returns none while there is no room for another graph."""
        if not self._max_rows or not self._room.is_free():
            return []
        sizes = dict.fromkeys(map(self.rows_for, range(1, min(max_rows, self._max_rows) + 1)))
        return [size for size in sizes if size and size not in self.captured]

    def _named(self, size: int) -> str:
        return f"{size} rows"
