from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from engine.host import unpack_kernels
from loader.files import frame
from loader.files.frame import FrameError
from loader.packing import codec
from tests.loader.checkpoints import bfloat16_weights

DECODERS = pytest.mark.parametrize("decode", [codec.decode, unpack_kernels.decode], ids=["numpy", "numba"])
Decode = Callable[[Any, Any], None]


def values_of(data: bytes) -> Any:
    return np.frombuffer(data, np.uint16)


def encoded(values: Any) -> Any:
    return np.frombuffer(bytearray(codec.encode(values)), np.uint8)


CASES = {
    "trained": values_of(bfloat16_weights(5000, 1)),
    "random bits": np.random.default_rng(2).integers(0, 1 << 16, 5000, np.uint16),
    "every value there is": np.arange(1 << 16, dtype=np.uint16),
    "zeros": np.zeros(3000, np.uint16),
    "not numbers": np.array([0x7F80, 0xFF80, 0x7FC0, 0xFFFF, 0x0001, 0x8000, 0x7F81] * 300, np.uint16),
    "few exponents": np.array([0x3F80, 0xBF81, 0x4000], np.uint16),
    "one": np.array([0x1234], np.uint16),
} | {f"{n} values": values_of(bfloat16_weights(n, n)) for n in (63, 64, 65, 127, 1023, 1024, 1025, 1088, 2047, 2049)}


@DECODERS
@pytest.mark.parametrize("name", list(CASES))
def test_every_bit_comes_back(name: str, decode: Decode) -> None:
    values = CASES[name]
    data = encoded(values)
    out = np.full(len(values) + 2, 0xAAAA, np.uint16)
    decode(data, out[1:-1])
    assert np.array_equal(out[1:-1], values)
    assert out[0] == out[-1] == 0xAAAA
    assert len(data) % frame.FRAME_ALIGN_BYTES == 0


@DECODERS
def test_frames_anywhere_in_memory(decode: Decode) -> None:
    values = CASES["trained"]
    data = codec.encode(values)
    for shift in range(9):
        held = np.zeros(len(data) + 16, np.uint8)
        held[shift : shift + len(data)] = np.frombuffer(data, np.uint8)
        out = np.empty(len(values), np.uint16)
        decode(held[shift : shift + len(data)], out)
        assert np.array_equal(out, values)
        assert unpack_kernels.sum_of(held[shift : shift + len(data)]) == codec.sum_of(np.frombuffer(data, np.uint8))


@pytest.mark.parametrize("sigma", [0.005, 0.02, 0.3, 1.0])
def test_gaussian_weights_take_at_most_72_percent(sigma: float) -> None:
    data = bfloat16_weights(1 << 18, 3, sigma)
    assert len(codec.encode(values_of(data))) <= 0.72 * len(data)


def test_a_tensor_of_mixed_scales_takes_at_most_72_percent() -> None:
    sigmas = np.random.default_rng(4).uniform(0.005, 0.05, 16)
    data = b"".join(bfloat16_weights(1 << 14, place, sigma) for place, sigma in enumerate(sigmas))
    assert len(codec.encode(values_of(data))) <= 0.725 * len(data)  # one table for what 16 tensors would have


@DECODERS
def test_what_no_encoder_wrote_is_refused(decode: Decode) -> None:
    """Whatever a checksum says: no decoder reads or writes outside."""
    values = CASES["trained"]
    good = encoded(values)
    out = np.empty(len(values), np.uint16)
    begin, end = frame.codes_at(len(values)), frame.offsets_at(len(values))
    more_codes, other_offsets = good.copy(), good.copy()
    more_codes[begin:end] = 0xFF
    other_offsets[end + 4 : end + 8] = 0xFF
    fewer = good.copy()
    fewer[begin:end] = 0
    counts, values_counted = good.copy(), good.copy()
    counts[4:8] = 0xFF
    values_counted[0] ^= 1
    short = good[: frame.escapes_at(len(values)) - 1]
    for bad in (more_codes, other_offsets, fewer, counts, values_counted, short, good[:-64], good[:5], np.append(good, good)):
        with pytest.raises(FrameError):
            decode(np.ascontiguousarray(bad), out)


@DECODERS
def test_rubbish_never_escapes(decode: Decode) -> None:
    """The counts right and all the rest random: either refused or the same as the twin's."""
    rng = np.random.default_rng(5)
    values = CASES["trained"]
    for _ in range(50):
        data = encoded(values)
        at = int(rng.integers(8, len(data)))
        data[at : at + 64] = rng.integers(0, 256, len(data[at : at + 64]), np.uint8)
        outcomes = []
        for one in (decode, codec.decode):
            out = np.zeros(len(values), np.uint16)
            try:
                one(data, out)
                outcomes.append(out.tobytes())
            except FrameError:
                outcomes.append(b"refused")
        assert outcomes[0] == outcomes[1]
