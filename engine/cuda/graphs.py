"""Decode steps as CUDA graphs: one for each of a few row counts, captured when first needed, all in one memory pool.

A graph holds addresses: of the weights (which return to the same range after an eviction), of the KV arena, of the model's
sequences and of its own input columns. Graphs that share a pool must not run at the same time, so all steps of a device run on one
stream.

Shapes: R rows, padding included.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.cuda.sequences import Staging

log = logging.getLogger("engine")

WARM_UP_STEPS = 2  # compile kernels and let libraries allocate what they keep, outside the capture

# The memory of all graphs of this process, whatever their model, and the stream they are captured on (libraries keep one work space
# for each stream).
_pool: Any = None
_stream: Any = None
_keeper: Any = None
_capturing = threading.Lock()  # a load captures its model's first graphs while the engine's loop may capture another's


def graph_rows(num_rows: int) -> int:
    """Returns the row count of the graph that runs num_rows rows: 1, 2, 4, then multiples of 8, of 16 above 64, of 32 above 128."""
    if num_rows <= 4:
        return 1 << (num_rows - 1).bit_length()
    step = 8 if num_rows <= 64 else 16 if num_rows <= 128 else 32
    return -(-num_rows // step) * step


@dataclass(slots=True)
class DecodeGraph:
    """A captured decode step of R rows. drawn: where it writes its result, ids and whether each row was bad. capture_s: seconds its
    capture took."""

    graph: Any
    inputs: Tensor  # int32: every column, as Staging.send lays them out
    drawn: Tensor  # [2, R] int32
    capture_s: float
    num_bytes: int  # by which the capture made the pool grow


def _make_pool(device: torch.device) -> None:
    """Creates the pool together with an empty graph that is kept for good: torch refuses a pool whose last graph was destroyed. The
    empty graph takes no memory of the pool."""
    global _pool, _stream, _keeper
    pool, stream, keeper = torch.cuda.graph_pool_handle(), torch.cuda.Stream(), torch.cuda.CUDAGraph()
    word = torch.zeros(1, dtype=torch.int32, device=device)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        keeper.capture_begin(pool=pool, capture_error_mode="thread_local")
        word.zero_()
        keeper.capture_end()
    _pool, _stream, _keeper = pool, stream, keeper


class DecodeGraphs:
    """The decode graphs of one model. step: computes columns -> [2, R] int32 (ids, and whether each row was bad) and is what is
    captured. last_ids: where the step leaves its tokens for the next one. max_rows: steps of more rows have no graph; 0 if no step
    has one."""

    def __init__(self, step: Callable[[dict[str, Tensor]], Tensor], staging: Staging, last_ids: Tensor, max_rows: int) -> None:
        self._step, self._staging, self._last_ids, self._max_rows = step, staging, last_ids, max_rows
        self.captured: dict[int, DecodeGraph] = {}
        self._refused: set[int] = set()  # row counts whose graph found no memory

    def rows_for(self, num_rows: int) -> int:
        """Returns the row count of the graph that runs num_rows rows, or 0 if none may run them."""
        rows = graph_rows(num_rows)
        return rows if rows <= self._max_rows and rows not in self._refused else 0

    def missing(self, max_rows: int) -> list[int]:
        """Returns the row counts of graphs that steps of up to max_rows rows may need and that are not captured yet, the smallest
        first."""
        sizes = dict.fromkeys(map(self.rows_for, range(1, min(max_rows, self._max_rows) + 1)))
        return [size for size in sizes if size and size not in self.captured]

    def run(self, num_rows: int, columns: Mapping[str, Any]) -> Tensor | None:
        """Runs a step of num_rows rows (a count that rows_for returned). Returns [2, R] int32, ids and whether each row was bad,
        which the next run overwrites. Returns None if there was no memory to capture the graph: then nothing has run, and from now
        on there is no graph for this count."""
        graph = self.captured.get(num_rows)
        if graph is None:
            try:
                graph = self.captured[num_rows] = self._capture(columns)
            except torch.OutOfMemoryError as error:
                self._refused.add(num_rows)
                log.warning("steps of %d rows have no graph: %s", num_rows, str(error).partition("\n")[0])
                return None
        else:
            self._staging.send(columns, graph.inputs)
        graph.graph.replay()
        return graph.drawn

    def _capture(self, columns: Mapping[str, Any]) -> DecodeGraph:
        """Captures the graph of a step. Other threads may load and copy meanwhile, but they must not wait for the whole device,
        only for its streams."""
        began_s = time.perf_counter()
        num_words = sum(-(-len(column) // 4) * 4 for column in columns.values())
        inputs = torch.zeros(num_words, dtype=torch.int32, device=self._last_ids.device)
        static = self._staging.send(columns, inputs)
        last_ids = self._last_ids.clone()
        with _capturing:
            if _pool is None:
                _make_pool(inputs.device)
            graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
            _stream.wait_stream(current)
            with torch.cuda.stream(_stream):
                for _ in range(WARM_UP_STEPS):
                    self._step(static)
                    self._last_ids.copy_(last_ids)  # a step reads its input tokens from last_ids and overwrites them
                reserved = torch.cuda.memory_reserved()
                graph.capture_begin(pool=_pool, capture_error_mode="thread_local")
                try:
                    drawn = self._step(static)
                finally:
                    graph.capture_end()
            current.wait_stream(_stream)
            grown = torch.cuda.memory_reserved() - reserved
        return DecodeGraph(graph, inputs, drawn, time.perf_counter() - began_s, grown)
