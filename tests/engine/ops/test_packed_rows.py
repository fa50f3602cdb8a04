"""Packed matrices unpack to the same bits, and their products have the bits that those of plain matrices have, by the kernels that
this processor can run. Kernels pack what loader/formats/packed_rows.py packs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from engine.host import compiled
from loader.formats import packed_rows
from loader.formats.packed_rows import BLOCK, ESCAPE, PANEL_ROWS
from tests.engine.ops.twins import compiled_as_called
from tests.kernel_cache import CACHE_DIR

pytest.importorskip("numba")
compiled.keep_in(CACHE_DIR)  # before a kernel is imported
from engine.cpu.kernels import linear, packed_linear, widened_linear  # noqa: E402
from engine.cpu.kernels.bits import HAS_BFLOAT16_PRODUCTS  # noqa: E402

kernels = compiled_as_called  # in place of the folder's fixture
SHAPES = [(80, 64), (65, 48), (6, 551), (130, 2000), (27, 128 + 33), (12, 8192)]  # outputs, inputs
NONE = np.empty(0, np.uint16)


def bits(values: Any) -> Any:
    """Returns the values as bfloat16 bits, cut off."""
    return (np.ascontiguousarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)


def drawn(*shape: int, scale: float = 0.02, outliers: float = 0.0) -> Any:
    """Returns normal numbers as bfloat16 bits, of which some are far from all others, or 0, infinite or NaN."""
    rng = np.random.default_rng(sum(shape))
    values = bits(rng.normal(0, scale, shape))
    strange = rng.random(shape) < outliers
    values[strange] = rng.integers(0, 1 << 16, shape)[strange]
    return values


def unpacked(packed: packed_rows.PackedRows, kernel: Any = None) -> Any:
    out = np.zeros((packed.num_outputs, packed.num_inputs), np.uint16)
    (kernel or packed_linear.unpack_rows_serial)(*packed.arrays, out)
    return out


def plain(x: Any, weight: Any, bias: Any) -> Any:
    """Returns the product by the kernel that multiplies a few rows with a plain matrix by vectors."""
    out, no_scale = np.zeros((len(x), len(weight)), np.uint16), np.empty(0, np.float32)
    if HAS_BFLOAT16_PRODUCTS:
        linear.few_rows_linear_serial(x, weight, no_scale, bias, out)
    else:
        words = np.empty(widened_linear.scratch_floats(*x.shape, 1), np.float32)
        widened_linear.widened_linear_serial(x, weight, no_scale, bias, words, 1, out)
    return out


def product(x: Any, packed: packed_rows.PackedRows, bias: Any, num_shares: int = 1) -> Any:
    out = np.full((len(x), packed.num_outputs), 0x7FC1, np.uint16)
    kernel = packed_linear.packed_linear_serial if num_shares == 1 else packed_linear.packed_linear_parallel
    kernel(x, *packed.arrays, bias, num_shares, out)
    return out


@pytest.mark.parametrize(
    "kernel", [packed_linear.unpack_rows_serial, packed_linear.unpack_rows_parallel], ids=["serial", "parallel"]
)
@pytest.mark.parametrize("is_mixed", [False, True])
def test_every_value_comes_back(kernel: Any, is_mixed: bool) -> None:
    """All 65,536: subnormal numbers, both zeros, infinities and every NaN among them, beside others like them and in any order."""
    values = np.arange(1 << 16, dtype=np.uint16)
    if is_mixed:
        values = np.random.default_rng(3).permutation(values)
    weights = values.reshape(64, 1024)
    np.testing.assert_array_equal(unpacked(packed_rows.pack(weights), kernel), weights)


@pytest.mark.parametrize("outliers", [0.0, 0.03, 1.0])
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [*SHAPES, (1, 1), (3, 63), (4096 + 5, 320)])
def test_weights_come_back(num_outputs: int, num_inputs: int, outliers: float) -> None:
    weights = drawn(num_outputs, num_inputs, outliers=outliers)
    np.testing.assert_array_equal(unpacked(packed_rows.pack(weights)), weights)


@pytest.mark.parametrize("outliers", [0.0, 0.03, 1.0])
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [*SHAPES, (1, 1), (3, 63), (4096 + 5, 320)])
def test_the_reference_and_the_kernel_pack_alike(num_outputs: int, num_inputs: int, outliers: float) -> None:
    """The reference unpacks what it has packed, too, in parts as well."""
    weights = drawn(num_outputs, num_inputs, outliers=outliers)
    wanted = packed_rows.pack(weights)
    *found, escapes = (np.full_like(one, 99) for one in (*wanted.arrays[:4], np.empty(weights.size + 64, np.uint8)))
    num_escapes = packed_linear.pack_rows(weights, *found, escapes)
    assert num_escapes == wanted.num_escapes
    for one, other in zip((*found, escapes[:num_escapes]), (*wanted.arrays[:4], wanted.escapes[:num_escapes]), strict=True):
        np.testing.assert_array_equal(one, other)
    blocks, out = packed_rows.num_blocks(num_inputs), np.zeros_like(weights)
    sizes = (256 * blocks, 12 * blocks, 4, 1)
    for first in range(0, len(wanted.starts), 3):
        last = min(first + 3, len(wanted.starts))
        parts = [one[first * each : last * each] for one, each in zip(wanted.arrays, sizes, strict=False)]
        packed_rows.unpack_rows(*parts, wanted.escapes, out[4 * first : 4 * last])
    np.testing.assert_array_equal(out, weights)


def test_panels_are_packed_apart() -> None:
    """A load packs the parts of a matrix in any order, and their escapes lie in that order."""
    weights = drawn(24, 200, outliers=0.05)
    whole, escapes, used = packed_rows.pack(weights), np.zeros(24 * 200 + 64, np.uint8), 0
    body, codes, bases, starts = (np.zeros_like(one) for one in whole.arrays[:4])
    for panel in (3, 0, 5, 1, 4, 2):
        own, listed = slice(4 * panel, 4 * panel + 4), np.zeros(4 * 200 + 64, np.uint8)
        to = [one.reshape(6, -1)[panel] for one in (body, codes, bases, starts)]
        count = packed_linear.pack_rows(weights[own], *to, listed)
        escapes[used : used + count], starts[panel], used = listed[:count], used, used + count
    packed = packed_rows.PackedRows(24, 200, body, codes, bases, starts, escapes)
    np.testing.assert_array_equal(unpacked(packed), weights)
    x = drawn(2, 200, scale=1.0)
    np.testing.assert_array_equal(product(x, packed, NONE), plain(x, weights, NONE))


def test_escapes_come_back_from_any_place() -> None:
    """One in a row's block at each place, in each row of a panel; all of a row's block; none."""
    weights = np.full((BLOCK + PANEL_ROWS, 2 * BLOCK), 0x3F80, np.uint16)
    weights[np.arange(BLOCK), np.arange(BLOCK)] = 0xFF80
    weights[np.arange(BLOCK), 2 * BLOCK - 1 - np.arange(BLOCK)] = 1
    weights[BLOCK, BLOCK:] = np.arange(BLOCK) * 0x3F1 | 0x4000
    weights[BLOCK, :BLOCK] = 0
    packed = packed_rows.pack(weights)
    assert packed.num_escapes >= 2 * BLOCK
    assert packed.num_escapes - packed.starts[-1] >= BLOCK - ESCAPE
    np.testing.assert_array_equal(unpacked(packed), weights)
    x = drawn(2, 2 * BLOCK, scale=1.0)
    np.testing.assert_array_equal(product(x, packed, NONE), plain(x, weights, NONE))


@pytest.mark.parametrize("outliers", [0.0, 0.03])
@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 5, 8, 15, 16])
@pytest.mark.parametrize(("num_outputs", "num_inputs"), SHAPES)
def test_products_have_the_bits_of_plain_ones(num_outputs: int, num_inputs: int, num_rows: int, outliers: float) -> None:
    """With and without a bias, by one thread and in shares."""
    weights, x = drawn(num_outputs, num_inputs, outliers=outliers), drawn(num_rows, num_inputs, scale=1.0)
    packed = packed_rows.pack(weights)
    for bias in (NONE, drawn(num_outputs, scale=1.0)):
        wanted = plain(x, weights, bias)
        assert outliers or len(np.unique(wanted)) > num_outputs // 2, "they are products"
        for num_shares in (1, 3):
            np.testing.assert_array_equal(product(x, packed, bias, num_shares), wanted)


def test_what_rows_hold_at_their_end_stays_out_of_products() -> None:
    """Inputs behind a row's last one meet no infinity, whatever exponents a row has."""
    weights, x = np.full((8, 70), 0x7F80, np.uint16), np.full((1, 70), 0x3F80, np.uint16)
    weights[:4] = 0x7F7F
    np.testing.assert_array_equal(product(x, packed_rows.pack(weights), NONE), plain(x, weights, NONE))


def test_weights_of_one_scale_take_seven_tenths() -> None:
    weights = drawn(256, 2048)
    packed = packed_rows.pack(weights)
    assert packed.nbytes < 0.705 * weights.nbytes
    assert packed.num_escapes < 0.025 * weights.size
    scaled = (weights.astype(np.uint32) << 16).view(np.float32) * 2.0 ** np.arange(-20, 44, 0.25)[:, None]
    assert packed_rows.pack(bits(scaled)).nbytes < 0.71 * weights.nbytes, "each row has a base of its own"
