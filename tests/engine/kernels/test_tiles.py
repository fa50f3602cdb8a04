"""Which tiles attention takes on which GPU."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from engine.cuda.kernels import tiles
from engine.cuda.kernels.tiles import HOPPER, Tile

HALF, FLOAT32 = 2, 4


@pytest.fixture(params=[0, 75, 80, 86, 89, HOPPER, 100, 120])
def capability(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(tiles, "capability", lambda: request.param)
    return int(request.param)


def test_what_was_measured_is_used_where_it_was_measured(capability: int) -> None:
    for (gpu, dim, fp8), tile in tiles.EXTEND.items():
        assert (tiles.extend_tile(dim, HALF, fp8=fp8) == tile) == (gpu == capability)
        assert tiles.extend_tile(dim, FLOAT32, fp8=fp8) != tile
    for (gpu, dim, fp8), tile in tiles.DECODE.items():
        assert (tiles.decode_tile(dim, HALF, fp8) == tile) == (gpu == capability)


def test_tiles_of_a_larger_head_size_keep_their_queries(capability: int) -> None:
    """A step's tiles are made once for all of a model's layers, for the widest heads."""
    for item_bytes in (HALF, FLOAT32):
        widest = tiles.extend_tile(512, item_bytes)
        for dim in (64, 128, 256):
            for fp8 in (False, True):
                assert tiles.extend_tile(dim, item_bytes, widest.tokens, fp8).tokens == widest.tokens


def test_wide_heads_take_less_at_a_time_where_shared_memory_is_short(capability: int) -> None:
    """99 KiB, in which queries, keys and values of a tile of heads of 256 or 512 numbers must have room."""
    for dim, item_bytes in ((256, HALF), (256, FLOAT32), (512, HALF)):
        tile = tiles.extend_tile(dim, item_bytes)
        held = (tile.tokens + 2 * tile.positions) * dim * item_bytes
        assert capability in tiles.MUCH_SHARED_MEMORY or held <= 65 << 10, tile
    assert tiles.extend_tile(64, HALF) == Tile(128, 64, 8, 3)
