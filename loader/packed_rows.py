"""The lossless form in which a matrix of bfloat16 weights may stay in memory, made for products that decode it on the way.

A row's base is the lowest of the seven exponents, one after the other, that most of the row's weights have. A weight is a byte with
its mantissa and its sign, and a code of three bits: by how much its exponent is above its row's base, up to 6. Code 7 is an escape,
whose exponent is stored in a byte of its own. So a weight takes eleven bits, and about a fifth of a bit for escapes.

Rows are taken four at a time (a panel; the last one is filled up with rows of no meaning), and a panel's inputs 64 at a time (a
block). What is needed of a panel lies in the order in which a product takes it, so that memory is read from its beginning to its
end:

    body     for each panel, each block, each of the four rows: 64 bytes, mantissa * 2 + sign
    codes    for each panel, each block, each of the four rows: three uint64, the codes' lowest bits first
    escapes  for each panel, each block, each of the four rows: the exponents of its escapes, a byte each; then ESCAPES_BEHIND zeros
    bases    for each row a byte
    starts   for each panel how many escapes are before it (uint32), and then how many there are

Within the 64 weights of a row's block, place p (a byte of the body, a bit of the codes) holds weight ORDER[p]: so that a vector of
bytes interleaved with a vector of exponents, 16 bytes of each at a time, has the weights in their own order. Exponent * 256 + byte
is a bfloat16 whose sign is at its lowest end; rotated by one bit it is the weight.

A base is 248 at most, so that what no weight uses (inputs behind a row's last one) decodes to a finite number.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

PANEL_ROWS = 4
BLOCK = 64  # inputs
NUM_PLANES = 3
ESCAPE = 7  # the code of an escape, and the number of exponents that have a code of their own
MOST_BASE = 248
ESCAPES_BEHIND = 64  # bytes behind the last escape, which decoding may read
ORDER = tuple(8 * (p // 16) + p % 8 + (32 if p % 16 >= 8 else 0) for p in range(BLOCK))
_WEIGHTS_AT_ONCE = 1 << 20  # that are packed at a time


@dataclass(slots=True, frozen=True)
class PackedRows:
    """A matrix [N, K] of bfloat16 weights, packed without loss into about eleven bits a weight; the module describes the format.
    All arrays have one dimension. body: mantissa and sign of each weight. codes: bit planes of the three-bit codes of exponents.
    bases: the exponent of each row that code 0 stands for. starts: for each panel of four rows, how many escapes are before it;
    then the number of all. escapes: the exponents that have no code."""

    num_outputs: int
    num_inputs: int
    body: Any  # uint8
    codes: Any  # uint64
    bases: Any  # uint8
    starts: Any  # uint32
    escapes: Any  # uint8

    @property
    def nbytes(self) -> int:
        return sum(one.nbytes for one in self.arrays)

    @property
    def num_escapes(self) -> int:
        return int(self.starts[-1])

    @property
    def arrays(self) -> tuple[Any, ...]:
        """The arrays in the order in which kernels take them: body, codes, bases, starts, escapes."""
        return self.body, self.codes, self.bases, self.starts, self.escapes


def pack(weights: Any) -> PackedRows:
    """Packs weights [N, K] without loss. weights: the bits of bfloat16 in uint16."""
    num_outputs, num_inputs = weights.shape
    panels, blocks = math.ceil(num_outputs / PANEL_ROWS), math.ceil(num_inputs / BLOCK)
    at_once = max(1, _WEIGHTS_AT_ONCE // (PANEL_ROWS * BLOCK * max(1, blocks)))
    parts = [_pack(weights[PANEL_ROWS * panel : PANEL_ROWS * (panel + at_once)], blocks) for panel in range(0, panels, at_once)]
    body, codes, bases, counts, escapes = (np.concatenate(part) for part in zip(*parts, strict=True))
    starts = np.zeros(panels + 1, np.uint32)
    np.cumsum(counts, out=starts[1:])
    return PackedRows(
        num_outputs, num_inputs, body, codes, bases, starts, np.concatenate((escapes, np.zeros(ESCAPES_BEHIND, np.uint8)))
    )


def _pack(weights: Any, blocks: int) -> tuple[Any, ...]:
    """Returns the body, codes, bases, numbers of escapes and escapes (see PackedRows) of some panels of four rows. weights [rows,
    inputs] uint16: the rows of these panels. blocks: number of blocks of 64 inputs in a row."""
    num_rows, num_inputs = weights.shape
    panels = math.ceil(num_rows / PANEL_ROWS)
    exponents = (weights >> np.uint16(7)).astype(np.uint8)
    of_rows = np.bincount(
        (exponents + np.arange(num_rows, dtype=np.int64)[:, None] * 256).ravel(), minlength=num_rows * 256
    ).reshape(num_rows, 256)
    up_to = np.pad(np.cumsum(of_rows, 1), ((0, 0), (1, 0)))
    bases = np.zeros(panels * PANEL_ROWS, np.uint8)
    bases[:num_rows] = np.argmax(up_to[:, ESCAPE : MOST_BASE + ESCAPE + 1] - up_to[:, : MOST_BASE + 1], 1)
    shape = (panels * PANEL_ROWS, blocks * BLOCK)
    codes, body, placed = np.zeros(shape, np.uint8), np.zeros(shape, np.uint8), np.zeros(shape, np.uint8)
    codes[:num_rows, :num_inputs] = np.minimum(exponents - bases[:num_rows, None], ESCAPE)
    body[:num_rows, :num_inputs] = (weights << np.uint16(1) | weights >> np.uint16(15)).astype(np.uint8)
    placed[:num_rows, :num_inputs] = exponents
    codes, body, placed = (_in_places(one, panels, blocks) for one in (codes, body, placed))
    is_escape = codes == ESCAPE
    planes = np.stack([np.packbits(codes >> bit & 1, axis=-1, bitorder="little") for bit in range(NUM_PLANES)], -2)
    counts = np.count_nonzero(is_escape.reshape(panels, -1), 1)
    return body.ravel(), planes.reshape(-1, 8).view("<u8").ravel(), bases, counts, placed[is_escape]


def _in_places(of_weights: Any, panels: int, blocks: int) -> Any:
    """Rearranges bytes [rows, inputs], one for each weight, to [panels, blocks, PANEL_ROWS, BLOCK]; within a block, place p gets
    the byte of weight ORDER[p]."""
    return of_weights.reshape(panels, PANEL_ROWS, blocks, BLOCK)[..., list(ORDER)].transpose(0, 2, 1, 3).copy()
