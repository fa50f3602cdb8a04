"""The lossless format of bfloat16 weights, one frame at a time: where a frame has what.

Trained weights use few exponents: the seven most frequent ones of a frame cover about 97 % of its values. A frame keeps sign and
mantissa as they are, a byte each, and the exponent as a 3-bit code: 0 to 6 stand for those seven, 7 for an escape, whose exponent
is a byte of its own. Eleven bits and a fraction instead of sixteen; codes have one length, so any 64 values are decoded at once.

A frame holds FRAME_VALUES values (a tensor's last one the rest) and can be decoded by itself, a group of GROUP_VALUES too.
Little-endian; N values, W = ceil(N / 64), G = ceil(N / GROUP_VALUES), E escapes:

    0          N and E (uint32 each); the seven exponents, the most frequent first, and a zero; zeros up to byte 64
    64         sign and mantissa: 64 W bytes, the sign in the highest bit
    ...        codes: three planes of W uint64, the lowest bits first; value v is bit v % 64 of word v // 64
    ...        offsets: G uint32, for each group the number of escapes before it
    ...        escapes: E exponents in the order of their values; zeros up to a multiple of 64

What lies behind the last value in sign and mantissa and in codes is zero.
"""

from __future__ import annotations

FRAME_VALUES = 1 << 20
GROUP_VALUES = 1024
WORD_VALUES = 64
HEAD_BYTES = 64
FRAME_ALIGN_BYTES = 64
TABLE_AT = 8
NUM_PLANES = 3
ESCAPE = 7  # the code, and the number of exponents that have another one
VALUE_BYTES = 2


class FrameError(ValueError):
    """A frame that no encoder has written."""


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
    """Of the whole frame."""
    return -(-(escapes_at(num_values) + num_escapes) // FRAME_ALIGN_BYTES) * FRAME_ALIGN_BYTES
