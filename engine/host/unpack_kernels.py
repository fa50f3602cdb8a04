"""Decodes packed weights on the CPU (Numba), 64 values at a time. A value's exponent is packed as a code of three bits: codes 0 to
6 stand for the seven most frequent exponents. Code 7 is an escape (one value in forty): its exponent is stored apart, and is filled
in after the others. The reference implementation is loader.packing.codec; the format is described in loader.files.frame.

Shapes: N values, W words of 64 values, E escapes, G groups of words."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import int64, njit, types, uint8, uint16, uint32, uint64, void
from numba.core import cgutils
from numba.extending import intrinsic

from loader.files.frame import FrameError
from loader.packing import checksum, codec

_VALUES = 64
_GROUP_WORDS = 16
_I64 = ir.IntType(64)
_BYTES, _WIDE = ir.VectorType(ir.IntType(8), _VALUES), ir.VectorType(ir.IntType(16), _VALUES)
_BITS = ir.VectorType(ir.IntType(1), _VALUES)
_FIRST = ir.Constant(ir.VectorType(ir.IntType(32), _VALUES), [0] * _VALUES)


def _splat(builder: ir.IRBuilder, value: Any) -> Any:
    undefined = ir.Constant(_BYTES, ir.Undefined)
    return builder.shuffle_vector(builder.insert_element(undefined, value, ir.Constant(ir.IntType(32), 0)), undefined, _FIRST)


def _wide(value: int) -> Any:
    return ir.Constant(_WIDE, [value] * _VALUES)


@intrinsic
def _decode_word(typing_context: Any, out: Any, body: Any, at: Any, low: Any, middle: Any, high: Any, table: Any) -> Any:
    """Decodes 64 values into out[at : at + 64] (uint16, the bits of bfloat16), from the 64 bytes of sign and mantissa at body[at]
    and from their three-bit codes of exponents: low, middle and high are uint64 words with the lowest, middle and highest bit of
    each code. table [7]: the exponents of codes 0 to 6. Values with code 7 get exponent 0."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        out_at, body_at, entries = (context.make_array(signature.args[i])(context, builder, args[i]).data for i in (0, 1, 6))
        exponents = [_splat(builder, builder.load(builder.gep(entries, [ir.Constant(_I64, code)]))) for code in range(7)]
        exponents.append(ir.Constant(_BYTES, [0] * _VALUES))
        for plane in args[3:6]:
            odd = builder.bitcast(plane, _BITS)
            exponents = [builder.select(odd, *pair) for pair in zip(exponents[1::2], exponents[::2], strict=True)]
        read = builder.load(builder.bitcast(builder.gep(body_at, [args[2]]), _BYTES.as_pointer()))
        read.align = 1
        wide = builder.zext(read, _WIDE)
        sign = builder.shl(builder.and_(wide, _wide(0x80)), _wide(8))
        exponent = builder.shl(builder.zext(exponents[0], _WIDE), _wide(7))
        value = builder.or_(builder.or_(sign, builder.and_(wide, _wide(0x7F))), exponent)
        store = builder.store(value, builder.bitcast(builder.gep(out_at, [args[2]]), _WIDE.as_pointer()))
        store.align = 2
        return context.get_dummy_value()

    return types.void(out, body, types.int64, types.uint64, types.uint64, types.uint64, table), generate


@intrinsic
def _lowest_bit(typing_context: Any, word: Any) -> Any:
    """Returns the index of the lowest set bit of a uint64 word, which must not be 0, as int64."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], cgutils.true_bit)

    return types.int64(types.uint64), generate


@njit(inline="always")
def _put_escapes(escaped: int, escapes: Any, taken: int, out: Any, at: int) -> int:
    """Fills in the exponents of the escaped values (those whose exponent has no code) among the 64 values from out[at] on. escaped:
    bit i is set if the code of value at + i is an escape. escapes: the exponents of all escaped values of the frame, in order.
    taken: how many of these exponents are used already. Returns how many are used afterwards, or -1 if there are not enough."""
    while escaped != 0:
        if taken >= escapes.shape[0]:
            return -1
        out[at + _lowest_bit(escaped)] |= uint16(escapes[taken]) << uint16(7)
        taken += 1
        escaped &= escaped - uint64(1)
    return taken


@njit(
    int64(uint8[::1], uint64[:, ::1], uint32[::1], uint8[::1], uint8[::1], uint16[::1]), error_model="numpy", cache=True, nogil=True
)
def _decode(body: Any, words: Any, offsets: Any, escapes: Any, table: Any, out: Any) -> int:
    """Decodes a frame (values that are packed together) into out [N] uint16, the bits of bfloat16 values. body [64 W]: sign and
    mantissa of each value. words [3, W]: the lowest bits of the exponents' codes, then the middle ones, then the highest. offsets
    [G]: number of escapes (values whose exponent has no code) before each group of words. escapes [E]: exponents of the escaped
    values. table [7]: the exponents of codes 0 to 6.

    Returns the number of escapes in the codes. Returns -1 if there are more than E, or if their numbers disagree with the offsets;
    out then has no meaning."""
    taken = 0
    num_whole = out.shape[0] // _VALUES
    for word in range(num_whole):
        low, middle, high = words[0, word], words[1, word], words[2, word]
        if word % _GROUP_WORDS == 0 and offsets[word // _GROUP_WORDS] != taken:
            return -1
        _decode_word(out, body, word * _VALUES, low, middle, high, table)
        taken = _put_escapes(low & middle & high, escapes, taken, out, word * _VALUES)
        if taken < 0:
            return -1
    if num_whole < words.shape[1]:
        low, middle, high = words[0, num_whole], words[1, num_whole], words[2, num_whole]
        if num_whole % _GROUP_WORDS == 0 and offsets[num_whole // _GROUP_WORDS] != taken:
            return -1
        rest = np.empty(_VALUES, np.uint16)
        _decode_word(rest, body[num_whole * _VALUES :], 0, low, middle, high, table)
        taken = _put_escapes(low & middle & high, escapes, taken, rest, 0)
        for at in range(num_whole * _VALUES, out.shape[0]):
            out[at] = rest[at - num_whole * _VALUES]
    return taken


@njit(void(uint64[::1], uint64[::1]), error_model="numpy", cache=True, nogil=True)
def _sum(words: Any, sums: Any) -> None:
    """Adds the sum of the words (uint64) to sums[0] and the sum of index * word to sums[1], both modulo 2**64."""
    plain, weighted = np.uint64(0), np.uint64(0)
    for index in range(words.shape[0]):
        plain += words[index]
        weighted += words[index] * np.uint64(index)
    sums[0] += plain
    sums[1] += weighted


def decode(data: Any, out: Any) -> None:
    """Decodes one frame of packed weights, data (uint8), into out (uint16 [N], bits of bfloat16), as loader.packing.codec.decode
    does. Raises FrameError for a bad frame; out then has no meaning."""
    if data.ctypes.data % 8:
        codec.decode(data, out)
        return
    parts = codec.Parts(data, len(out))
    if _decode(parts.body, parts.words, parts.offsets, parts.escapes, parts.table, out) != len(parts.escapes):
        raise FrameError(f"its codes do not ask for its {len(parts.escapes)} escapes")


def sum_of(data: Any) -> int:
    """Returns the checksum of data (uint8, of any length), the same as loader.packing.codec.sum_of."""
    whole = len(data) // 8 * 8
    if data.ctypes.data % 8:
        return codec.sum_of(data)
    sums = np.zeros(2, np.uint64)
    _sum(data[:whole].view(np.uint64), sums)
    checksum.add_rest(data[whole:], whole // 8, sums)
    return checksum.combined([checksum.joined(sums)])
