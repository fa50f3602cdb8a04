"""The reference implementation, in numpy, of the lossless format of bfloat16 weights (loader.files.frame). Every other decoder must
agree with it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from loader.files import frame
from loader.files.frame import ESCAPE, GROUP_VALUES, FrameError
from loader.packing import checksum

_COUNTED_VALUES = 1 << 16  # a frame's seven exponents are found from about this many of its values (up to twice as many)


def sum_of(data: Any) -> int:
    """Returns the 64-bit checksum that packed files record for a frame, a piece that can be decoded alone. data: the frame's bytes,
    uint8."""
    return checksum.combined([checksum.of(data)])


def encode(values: Any) -> bytes:
    """Packs bfloat16 values without loss into a frame (loader/files/frame.py) and returns its bytes. values: uint16 [N], the bits
    of the values, contiguous; 1 to FRAME_VALUES of them."""
    num_values = len(values)
    halves = values.view(np.uint8)
    low, high = halves[::2], halves[1::2]
    exponents = high << np.uint8(1) | low >> np.uint8(7)
    counted = exponents[:: max(1, num_values // _COUNTED_VALUES)]
    table = np.argsort(-np.bincount(counted, minlength=256), kind="stable")[:ESCAPE].astype(np.uint8)
    code_of = np.full(256, ESCAPE, np.uint8)
    code_of[table] = np.arange(ESCAPE, dtype=np.uint8)
    codes = np.frombuffer(exponents.tobytes().translate(code_of.tobytes()), np.uint8)  # indexing takes several times as long
    escaped = np.flatnonzero(codes == ESCAPE)
    head = np.array([num_values, len(escaped)], "<u4").tobytes() + table.tobytes()
    body = high & np.uint8(0x80) | low & np.uint8(0x7F)
    words = frame.num_words(num_values)
    parts = [head.ljust(frame.HEAD_BYTES, b"\0"), body.tobytes().ljust(words * frame.WORD_VALUES, b"\0")]
    planes = (np.packbits(codes & np.uint8(1 << bit), bitorder="little") for bit in range(frame.NUM_PLANES))
    parts += [plane.tobytes().ljust(8 * words, b"\0") for plane in planes]
    parts += [_offsets(escaped, num_values).tobytes(), exponents[escaped].tobytes()]
    return b"".join(parts).ljust(frame.frame_bytes(num_values, len(escaped)), b"\0")


def _offsets(escaped: Any, num_values: int) -> Any:
    """Returns, for each group of GROUP_VALUES values of a frame, the number of escapes (values whose exponents have no code) before
    the group: uint32 [groups]. escaped: indices of the escapes, ascending."""
    return np.searchsorted(escaped, np.arange(frame.num_groups(num_values)) * GROUP_VALUES).astype("<u4")


class Parts:
    """The parts of a packed frame (loader/files/frame.py), as views of its bytes. table: the seven exponents that have a code.
    body: sign and mantissa of each value. words: the bit planes of the exponents' codes, uint64 [planes, words]. offsets: for each
    group of values, the number of escapes before it. escapes: the exponents that have no code."""

    __slots__ = ("body", "escapes", "offsets", "table", "words")

    def __init__(self, data: Any, num_values: int) -> None:
        """Divides a frame into its parts. data: the frame, uint8, contiguous. Raises FrameError unless the frame holds
        `num_values` values and is as long as its head says."""
        begin, codes, offsets = frame.HEAD_BYTES, frame.codes_at(num_values), frame.offsets_at(num_values)
        escapes = frame.escapes_at(num_values)
        if len(data) < escapes:
            raise FrameError(f"{len(data)} bytes are too few for {num_values} values")
        held, num_escapes = (int(count) for count in data[: frame.TABLE_AT].view("<u4"))
        if held != num_values or frame.frame_bytes(num_values, num_escapes) != len(data):
            raise FrameError(f"it holds {held} values with {num_escapes} escapes, not {num_values} in {len(data)} bytes")
        self.table = data[frame.TABLE_AT : frame.TABLE_AT + ESCAPE]
        self.body = data[begin:codes]
        self.words = data[codes:offsets].view("<u8").reshape(frame.NUM_PLANES, -1)
        self.offsets = data[offsets:escapes].view("<u4")
        self.escapes = data[escapes : escapes + num_escapes]


def decode(data: Any, out: Any) -> None:
    """Unpacks a frame, a piece of a packed file, into bfloat16 values. data: the frame, uint8, contiguous. out: uint16 [N],
    receives the bits of all values. Raises FrameError if the frame is not valid or does not hold N values."""
    parts = Parts(data, len(out))
    codes = np.unpackbits(parts.words[0].view(np.uint8), bitorder="little")
    for bit in range(1, frame.NUM_PLANES):
        codes |= np.unpackbits(parts.words[bit].view(np.uint8), bitorder="little") << np.uint8(bit)
    codes = codes[: len(out)]
    escaped = np.flatnonzero(codes == ESCAPE)
    if len(escaped) != len(parts.escapes) or not np.array_equal(_offsets(escaped, len(out)), parts.offsets):
        raise FrameError(f"its codes ask for {len(escaped)} escapes, it has {len(parts.escapes)}, or counts them otherwise")
    exponents = np.frombuffer(bytearray(codes.tobytes().translate(parts.table.tobytes().ljust(256, b"\0"))), np.uint8)
    exponents[escaped] = parts.escapes
    body = parts.body[: len(out)]
    halves = out.view(np.uint8)
    np.bitwise_or(body & np.uint8(0x7F), exponents << np.uint8(7), out=halves[::2])
    np.bitwise_or(body & np.uint8(0x80), exponents >> np.uint8(1), out=halves[1::2])
