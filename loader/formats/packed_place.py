"""Describes where a matrix that stays packed in memory (loader/formats/packed_rows.py) lies in a model's weight range.

A packed weight whose exponent has no three-bit code is an escape, and takes a further byte. How many escapes a matrix has is known
only when it has been read, so room is kept for one in every ESCAPE_SHARE weights; a load of a matrix with more escapes fails.
Normally distributed weights have one escape in 47, and weights with much heavier tails (Student's t with three degrees of freedom)
one in 23.
"""

from __future__ import annotations

from typing import NamedTuple

from loader.formats.alignment import aligned
from loader.formats.packed_rows import ESCAPES_BEHIND, PANEL_BODY_BYTES, PANEL_CODES, PANEL_ROWS, num_blocks, num_panels

ESCAPE_SHARE = 16
CODE_BYTES, START_BYTES = 8, 4


class PackedPlace(NamedTuple):
    """The location of a packed matrix [num_outputs, num_inputs] in a model's weight range: consecutive bytes with five arrays
    (body, codes, bases, starts, escapes), which loader/formats/packed_rows.py explains. The matrix consists of all matrices of a
    tensor group, since one matrix multiplication reads them together. begin_bytes: the offset of the first byte, a multiple of
    64."""

    begin_bytes: int
    num_outputs: int
    num_inputs: int

    @property
    def num_panels(self) -> int:
        return num_panels(self.num_outputs)

    @property
    def row_body_bytes(self) -> int:
        """The number of bytes that one row takes in the array `body`, which holds the sign and mantissa of each weight."""
        return num_blocks(self.num_inputs) * PANEL_BODY_BYTES // PANEL_ROWS

    @property
    def _panel_codes_bytes(self) -> int:
        return num_blocks(self.num_inputs) * PANEL_CODES * CODE_BYTES

    @property
    def codes_at_bytes(self) -> int:
        return aligned(self.begin_bytes + self.num_panels * PANEL_ROWS * self.row_body_bytes)

    @property
    def bases_at_bytes(self) -> int:
        return aligned(self.codes_at_bytes + self.num_panels * self._panel_codes_bytes)

    @property
    def starts_at_bytes(self) -> int:
        return aligned(self.bases_at_bytes + self.num_panels * PANEL_ROWS)

    @property
    def escapes_at_bytes(self) -> int:
        return aligned(self.starts_at_bytes + self.num_panels * START_BYTES)

    @property
    def most_escapes(self) -> int:
        return -(-self.num_outputs * self.num_inputs // ESCAPE_SHARE)

    @property
    def end_bytes(self) -> int:
        return self.escapes_at_bytes + self.most_escapes + ESCAPES_BEHIND

    def row_at(self, place_bytes: int) -> int:
        """Returns the index of the matrix row to which an offset in the weight range belongs. place_bytes: the offset, counted as
        though the rows of the array `body` lay end to end (WeightSlot.offset_bytes). In memory the rows of each panel (four rows)
        are interleaved."""
        return (place_bytes - self.begin_bytes) // self.row_body_bytes

    def ranges(self, first: int, last: int) -> list[tuple[int, int]]:
        """Returns where the panels (groups of four rows) with the indices `first` to `last` - 1 lie: four ranges [begin, end) of
        the weight range, in bytes, in the arrays body, codes, bases and starts. The array of escapes (exponents that have no
        three-bit code) is left out, because a panel's escapes may lie anywhere in it."""
        sizes = (
            (self.begin_bytes, PANEL_ROWS * self.row_body_bytes),
            (self.codes_at_bytes, self._panel_codes_bytes),
            (self.bases_at_bytes, PANEL_ROWS),
            (self.starts_at_bytes, START_BYTES),
        )
        return [(begin + first * each, begin + last * each) for begin, each in sizes]
