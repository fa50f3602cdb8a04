"""Defines the layout of a frame, the unit of the lossless format of bfloat16 weights in packed files.

Trained weights use few exponents: the seven most frequent ones of a frame cover about 97 % of its values. A frame keeps each
value's sign and mantissa unchanged in a byte, and its exponent as a 3-bit code. Codes 0 to 6 stand for those seven exponents. Code
7 is an escape, whose exponent is stored in a byte of its own. A value takes a little more than eleven bits instead of sixteen. All
codes have the same length, so any 64 values are decoded at once.

A frame holds up to FRAME_VALUES values. Each frame can be decoded by itself, and so can each group of GROUP_VALUES values within
it. Numbers are little-endian. For N values with E escapes, W = ceil(N / 64) and G = ceil(N / GROUP_VALUES):

    0          N and E (uint32 each); the seven exponents, the most frequent first, and a zero; zeros up to byte 64
    64         sign and mantissa: 64 W bytes, the sign in the highest bit
    ...        codes: three planes of W uint64, the lowest bits first; value v is bit v % 64 of word v // 64
    ...        offsets: G uint32, for each group the number of escapes before it
    ...        escapes: E exponents in the order of their values; zeros up to a multiple of 64

If N is no multiple of 64, zeros follow the last value's sign and mantissa, and its code.
"""

from __future__ import annotations

FRAME_VALUES = 1 << 20
GROUP_VALUES = 1024
WORD_VALUES = 64
HEAD_BYTES = 64
FRAME_ALIGN_BYTES = 64
TABLE_AT = 8
NUM_PLANES = 3
ESCAPE = 7  # the code of an escape, and the number of exponents that have a code of their own
VALUE_BYTES = 2


class FrameError(ValueError):
    """Raised for bytes that are not a valid frame."""


def num_words(num_values: int) -> int:
    return -(-num_values // WORD_VALUES)


def num_groups(num_values: int) -> int:
    return -(-num_values // GROUP_VALUES)


def codes_at(num_values: int) -> int:
    return HEAD_BYTES + num_words(num_values) * WORD_VALUES


def offsets_at(num_values: int) -> int:
    return codes_at(num_values) + 8 * NUM_PLANES * num_words(num_values)


def escapes_at(num_values: int) -> int:
    return offsets_at(num_values) + 4 * num_groups(num_values)


def frame_bytes(num_values: int, num_escapes: int) -> int:
    """Returns the length in bytes of a frame with num_values values, a multiple of FRAME_ALIGN_BYTES. num_escapes: how many of
    these values are escapes, whose exponents have no three-bit code and take a byte each."""
    return -(-(escapes_at(num_values) + num_escapes) // FRAME_ALIGN_BYTES) * FRAME_ALIGN_BYTES
