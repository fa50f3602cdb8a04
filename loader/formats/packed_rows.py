"""Packs matrices of bfloat16 weights into a lossless form in which they can stay in memory, because matrix multiplications decode
it as they read it.

A weight is stored as a byte with its mantissa and its sign, and a code of three bits for its exponent. Each row has a base: the
lowest of seven consecutive exponents, chosen so that as many of the row's weights as possible have one of them. Codes 0 to 6 mean
base + code. Code 7 marks an escape, whose exponent is stored in a further byte. So a weight takes eleven bits, and on average about
a fifth of a bit for escapes.

Four rows make a panel; the last panel is filled up with rows that are never used. 64 inputs of a panel make a block. The five
arrays below have the order in which a matrix multiplication reads them, so that it reads memory from beginning to end:

    body     for each panel, each block, each of the four rows: 64 bytes, mantissa * 2 + sign
    codes    for each panel, each block, each of the four rows: three uint64, the codes' lowest bits first
    bases    for each row a byte
    starts   for each panel the index of its first escape (uint32)
    escapes  for each panel, each block, each of the four rows: the exponents of its escapes, a byte each; then ESCAPES_BEHIND bytes

The escapes of different panels may lie in any order. Within the 64 weights of a row's block, place p (a byte of the body, a bit of
the codes) holds weight ORDER[p]. With this order a vector instruction that interleaves 16 bytes of the body with 16 exponents gives
weights in their own order. Exponent * 256 + byte is a bfloat16 whose sign is its lowest bit; rotated by one bit it is the weight.

A base is at most 248, so that places without a weight (behind a row's last input) also decode to finite numbers.
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
ESCAPES_BEHIND = 64  # bytes behind the last escape, which decoding may read and packing may write
ORDER = tuple(8 * (p // 16) + p % 8 + (32 if p % 16 >= 8 else 0) for p in range(BLOCK))
PLANE_BYTES = 8  # a bit for each weight of a row's block
PANEL_BODY_BYTES = PANEL_ROWS * BLOCK  # for each block
PANEL_CODES = PANEL_ROWS * NUM_PLANES  # the same, in uint64
_WEIGHTS_AT_ONCE = 1 << 20  # that are packed at a time


@dataclass(slots=True, frozen=True)
class PackedRows:
    """A matrix [N, K] of bfloat16 weights, packed without loss into about eleven bits a weight; the module describes the format.
    All arrays have one dimension. body: mantissa and sign of each weight. codes: bit planes of the three-bit codes of exponents.
    bases: the exponent of each row that code 0 stands for. starts: for each panel of four rows, the index of its first escape.
    escapes: the exponents that have no code."""

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
        return len(self.escapes) - ESCAPES_BEHIND

    @property
    def arrays(self) -> tuple[Any, ...]:
        """The arrays in the order in which kernels take them: body, codes, bases, starts, escapes."""
        return self.body, self.codes, self.bases, self.starts, self.escapes


def num_panels(num_outputs: int) -> int:
    return math.ceil(num_outputs / PANEL_ROWS)


def num_blocks(num_inputs: int) -> int:
    return math.ceil(num_inputs / BLOCK)


def pack(weights: Any) -> PackedRows:
    """Packs weights [N, K] without loss. weights: the bits of bfloat16 in uint16."""
    num_outputs, num_inputs = weights.shape
    panels, blocks = num_panels(num_outputs), num_blocks(num_inputs)
    body, codes = np.empty(panels * blocks * PANEL_BODY_BYTES, np.uint8), np.empty(panels * blocks * PANEL_CODES, np.uint64)
    bases, starts = np.empty(panels * PANEL_ROWS, np.uint8), np.empty(panels, np.uint32)
    escapes = np.zeros(weights.size + ESCAPES_BEHIND, np.uint8)
    num_escapes = pack_rows(weights, body, codes, bases, starts, escapes)
    kept = np.concatenate((escapes[:num_escapes], np.zeros(ESCAPES_BEHIND, np.uint8)))
    return PackedRows(num_outputs, num_inputs, body, codes, bases, starts, kept)


def pack_rows(weights: Any, body: Any, codes: Any, bases: Any, starts: Any, escapes: Any) -> int:
    """Packs whole panels of rows into the parts of a packed matrix's arrays (see PackedRows) that belong to these panels, and
    returns the number of their escapes (exponents that have no three-bit code, stored apart). weights: [rows, K] uint16, the bits
    of bfloat16. starts: gets indices that are counted from the first escape of these rows. escapes: must have room for weights.size
    + ESCAPES_BEHIND bytes."""
    num_rows, num_inputs = weights.shape
    blocks = num_blocks(num_inputs)
    at_once, num_escapes = max(1, _WEIGHTS_AT_ONCE // (PANEL_ROWS * BLOCK * max(1, blocks))), 0
    for first in range(0, num_panels(num_rows), at_once):
        some = weights[PANEL_ROWS * first : PANEL_ROWS * (first + at_once)]
        last = first + num_panels(len(some))
        own = [
            body[first * blocks * PANEL_BODY_BYTES : last * blocks * PANEL_BODY_BYTES],
            codes[first * blocks * PANEL_CODES : last * blocks * PANEL_CODES],
            bases[first * PANEL_ROWS : last * PANEL_ROWS],
        ]
        counts, found = _pack(some, blocks, *own)
        starts[first:last] = num_escapes + np.cumsum(counts) - counts
        escapes[num_escapes : num_escapes + len(found)] = found
        num_escapes += len(found)
    return num_escapes


def _pack(weights: Any, blocks: int, body: Any, codes: Any, bases: Any) -> tuple[Any, Any]:
    """Packs weights [rows, inputs] uint16 into the arrays body, codes and bases of their panels of four rows (see PackedRows).
    Returns (the number of escapes of each panel, all escapes); an escape is an exponent that has no three-bit code. blocks: number
    of blocks of 64 inputs in a row."""
    num_rows, num_inputs = weights.shape
    panels = num_panels(num_rows)
    exponents = (weights >> np.uint16(7)).astype(np.uint8)
    of_rows = np.bincount(
        (exponents + np.arange(num_rows, dtype=np.int64)[:, None] * 256).ravel(), minlength=num_rows * 256
    ).reshape(num_rows, 256)
    up_to = np.pad(np.cumsum(of_rows, 1), ((0, 0), (1, 0)))
    bases[:] = 0
    bases[:num_rows] = np.argmax(up_to[:, ESCAPE : MOST_BASE + ESCAPE + 1] - up_to[:, : MOST_BASE + 1], 1)
    shape = (panels * PANEL_ROWS, blocks * BLOCK)
    own_codes, own_body, placed = np.zeros(shape, np.uint8), np.zeros(shape, np.uint8), np.zeros(shape, np.uint8)
    own_codes[:num_rows, :num_inputs] = np.minimum(exponents - bases[:num_rows, None], ESCAPE)
    own_body[:num_rows, :num_inputs] = (weights << np.uint16(1) | weights >> np.uint16(15)).astype(np.uint8)
    placed[:num_rows, :num_inputs] = exponents
    own_codes, own_body, placed = (_in_places(one, panels, blocks) for one in (own_codes, own_body, placed))
    is_escape = own_codes == ESCAPE
    planes = np.stack([np.packbits(own_codes >> bit & 1, axis=-1, bitorder="little") for bit in range(NUM_PLANES)], -2)
    body[:], codes[:] = own_body.ravel(), planes.reshape(-1, PLANE_BYTES).view("<u8").ravel()
    return np.count_nonzero(is_escape.reshape(panels, -1), 1), placed[is_escape]


def _in_places(of_weights: Any, panels: int, blocks: int) -> Any:
    """Rearranges bytes [rows, inputs], one for each weight, into the order of the array `body`, which holds a byte for each weight:
    [panels, blocks, PANEL_ROWS, BLOCK]. The last axis has 64 consecutive weights of a row; its position p gets the byte of weight
    ORDER[p] of these."""
    return of_weights.reshape(panels, PANEL_ROWS, blocks, BLOCK)[..., list(ORDER)].transpose(0, 2, 1, 3).copy()


def unpack_rows(body: Any, codes: Any, bases: Any, starts: Any, escapes: Any, out: Any) -> None:
    """Unpacks the weights of consecutive panels (four rows each) to out [rows, K] uint16. body, codes, bases, starts: the parts of
    a packed matrix's arrays (see PackedRows) that belong to these panels. escapes: the array of escapes (exponents that have no
    three-bit code) of the whole matrix."""
    num_rows, num_inputs = out.shape
    panels, blocks = len(starts), num_blocks(num_inputs)
    shape = (panels, blocks, PANEL_ROWS, BLOCK)
    planes = np.unpackbits(codes.astype("<u8").view(np.uint8), bitorder="little").reshape(*shape[:3], NUM_PLANES, BLOCK)
    own_codes = planes[..., 0, :] | planes[..., 1, :] << 1 | planes[..., 2, :] << 2
    exponents = own_codes + bases.reshape(panels, 1, PANEL_ROWS, 1)
    is_escape = own_codes == ESCAPE
    counts = np.count_nonzero(is_escape.reshape(panels, -1), 1)
    exponents[is_escape] = escapes[np.arange(counts.sum()) + np.repeat(starts - (np.cumsum(counts) - counts), counts)]
    words = exponents.astype(np.uint16) << np.uint16(8) | body.reshape(shape)
    weights = np.empty(shape, np.uint16)
    weights[..., list(ORDER)] = words >> np.uint16(1) | words << np.uint16(15)
    out[:] = weights.transpose(0, 2, 1, 3).reshape(panels * PANEL_ROWS, blocks * BLOCK)[:num_rows, :num_inputs]
