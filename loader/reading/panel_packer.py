"""Packs matrices that stay packed in memory (loader/formats/packed_rows.py) while a load reads their rows.

A load reads parts of a matrix in any order, in several threads. A panel (four rows) is packed as soon as all its rows have been
read. Its escapes (exponents that have no three-bit code) take the next free bytes of the array that the matrix has for escapes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from loader.formats import packed_rows
from loader.formats.packed_place import ESCAPE_SHARE, PackedPlace
from loader.formats.packed_rows import ESCAPES_BEHIND, PANEL_ROWS
from loader.reading.thread_buffer import ThreadBuffer

PackRows = Callable[..., int]  # as loader.formats.packed_rows.pack_rows


class PanelPacker:
    """Packs the rows of matrices into the model's weight range (the memory for all its weights), for one load. Several threads may
    use it at once. memory: the weight range, uint8. pack_rows: the implementation of loader.formats.packed_rows.pack_rows."""

    def __init__(self, memory: Any, pack_rows: PackRows = packed_rows.pack_rows) -> None:
        self._memory, self._pack_rows = memory, pack_rows
        self._lock = threading.Lock()
        self._num_escapes: dict[PackedPlace, int] = {}
        self._waiting: dict[tuple[PackedPlace, int], dict[int, Any]] = {}  # (place, panel) -> row within the panel -> weights
        self._scratch = ThreadBuffer()

    def add(self, place: PackedPlace, first: int, rows: Any) -> None:
        """Packs consecutive rows of a matrix. Rows are packed in panels of four: if some rows of a panel have not been added yet,
        copies of its other rows are kept until they are. Each row must be added once, in any order. place: the matrix's location.
        first: the index of the first row. rows: [N, K] uint16, the bits of bfloat16, contiguous. Raises ValueError if the matrix
        has more escapes (exponents that have no three-bit code) than PackedPlace.most_escapes."""
        begin = min(-first % PANEL_ROWS, len(rows))
        end = len(rows) if first + len(rows) == place.num_outputs else begin + (len(rows) - begin) // PANEL_ROWS * PANEL_ROWS
        if end > begin:
            self._write(place, (first + begin) // PANEL_ROWS, rows[begin:end])
        for at in (*range(begin), *range(end, len(rows))):
            self._add_row(place, first + at, rows[at])

    def _add_row(self, place: PackedPlace, row: int, weights: Any) -> None:
        panel, within = divmod(row, PANEL_ROWS)
        num_rows = min(PANEL_ROWS, place.num_outputs - panel * PANEL_ROWS)
        with self._lock:
            there = self._waiting.setdefault((place, panel), {})
            there[within] = weights.copy()
            if len(there) < num_rows:
                return
            del self._waiting[place, panel]
        self._write(place, panel, np.stack([there[number] for number in range(num_rows)]))

    def _write(self, place: PackedPlace, panel: int, rows: Any) -> None:
        """Packs the rows of whole panels (four rows each) into the packed matrix in memory. panel: the index of the first panel.
        rows: the weights of all rows of these panels."""
        ranges = place.ranges(panel, panel - (-len(rows) // PANEL_ROWS))
        body, codes, bases, starts = (self._memory[begin:end] for begin, end in ranges)
        starts, listed = starts.view(np.uint32), self._scratch.take(rows.size + ESCAPES_BEHIND)
        count = self._pack_rows(rows, body, codes.view(np.uint64), bases, starts, listed)
        with self._lock:
            at = self._num_escapes.get(place, 0)
            self._num_escapes[place] = at + count
        if at + count > place.most_escapes:
            raise ValueError(
                f"can't stay packed: more than one in {ESCAPE_SHARE} of its weights, or of those read with it, is far smaller or "
                'larger than most of its row; leave resident = "packed" out'
            )
        starts += np.uint32(at)
        begin = place.escapes_at_bytes + at
        self._memory[begin : begin + count] = listed[:count]
