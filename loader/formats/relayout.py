"""Describes how tensors of AWQ and GPTQ checkpoints are rearranged in memory. In the files a matrix has a row for each input and a
column for each output; in memory the weights of an output lie one after the other, because kernels read them in that order.

int4_relayout.py rearranges the numbers. Shapes: R rows of a stored tensor, C elements of a row.
"""

from __future__ import annotations

import math
from typing import NamedTuple


class Relayout(NamedTuple):
    """A way to rearrange the numbers of a stored tensor in memory. name: what the numbers are. rows: number of stored rows that
    become one column in memory; 0: the whole tensor is rearranged at once. spread: how many outputs have a number in each stored
    element, for example 8 in a word of zero points. item_bytes: bytes of an element in memory; 0: nothing is held, and the numbers
    are only checked. turned: whether stored rows become columns (the tensor is transposed)."""

    name: str
    rows: int = 1
    spread: int = 1
    item_bytes: int = 4
    turned: bool = True

    def held_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape that a tensor has in memory. shape: its stored shape."""
        if not self.item_bytes:
            return (0,)
        if len(shape) == 1:
            return shape
        rows, columns = shape
        return (self.spread * columns, rows // self.rows) if self.turned else (self.spread * rows, columns)

    def held_bytes(self, shape: tuple[int, ...]) -> int:
        return math.prod(self.held_shape(shape)) * self.item_bytes

    def unit_rows(self, shape: tuple[int, ...]) -> int:
        """Returns how many stored rows have to be read before they can be rearranged. shape: the tensor's stored shape."""
        return self.rows or shape[0]


# words that a GPU rearranges at a time, and the memory for it: the words, a copy, and intermediate results
WORDS_AT_ONCE = 1 << 20
REARRANGING_BYTES = 24 << 20

# eight inputs of an output in a word, the first in the lowest four bits: the word that kernels read
GPTQ_WORDS = Relayout("gptq words")
# eight outputs in a word, the even ones before the odd ones
AWQ_WORDS = Relayout("awq words", rows=8, spread=8)
SCALES = Relayout("scales", item_bytes=2)
# eight outputs in a word: in their order (GPTQ; v1 stores them minus 1), in AWQ's order of weights, or [outputs / 8, groups]
GPTQ_V1_ZEROS, GPTQ_V2_ZEROS, AWQ_ZEROS = (Relayout(f"{name} zeros", spread=8, item_bytes=1) for name in ("v1", "v2", "awq"))
ZEROS_BY_OUTPUT = Relayout("zeros by output", spread=8, item_bytes=1, turned=False)
# zero points that must be 8, and groups of inputs that must lie in order
V1_EIGHTS, V2_EIGHTS, GROUPS_IN_ORDER = (Relayout(name, item_bytes=0) for name in ("v1 eights", "v2 eights", "groups in order"))
# the inputs in the order of their groups
INPUT_ORDER = Relayout("input order", rows=0)
