"""Which tiles attention takes on which GPU, and that the table is whole."""

from __future__ import annotations

import json
import os
import pathlib
import threading

import pytest

pytest.importorskip("triton")

from engine.cuda.kernels import tiles
from engine.cuda.kernels.tiles import (
    DECODE_KERNEL,
    EXTEND_KERNEL,
    FLOAT32,
    HALF,
    HOPPER,
    SHARED_BYTES,
    TABLES,
    Key,
    MeasuredTile,
    Tile,
)
from tests.engine.not_interpreted import KERNEL_CACHE, output_of

COMPILES_ALL = "HEARTHD_TEST_SHAPES" in os.environ
LIMIT_S = 2400 if COMPILES_ALL else 300
CANDIDATE_STACK_BYTES = 128  # tiles that are compared may keep some numbers on the stack: they are measured
# Bytes that entries keep on the stack. The first two were measured to be the fastest; heads of 512 have no tile without that has
# the 64 queries which Hopper's matrix instructions take.
SPILLING = {
    Key(HOPPER, 128, HALF, True): 40,
    Key(HOPPER, 256, HALF, False): 40,
    Key(HOPPER, 512, HALF, False): 208,
}


@pytest.fixture(params=[0, 75, 80, 86, 89, HOPPER, 100, 103, 120])
def capability(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(tiles, "capability", lambda: request.param)
    return int(request.param)


def test_what_was_measured_on_hopper_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "capability", lambda: HOPPER)
    assert tiles.extend_tile(64, HALF) == Tile(128, 64, 8, 3)
    assert tiles.extend_tile(128, HALF) == Tile(128, 128, 8, 2)
    assert tiles.extend_tile(128, HALF, True) == Tile(128, 128, 8, 3)
    assert tiles.extend_tile(256, HALF) == Tile(128, 64, 8, 2)
    assert tiles.decode_tile(128, HALF) == Tile(1, 64, 4, 3)
    assert tiles.decode_tile(128, HALF, True) == Tile(1, 128, 4, 3)
    measured = {(kernel, key) for kernel, table in TABLES.items() for key, entry in table.items() if entry.measured}
    prompts, steps = ((64, False), (128, False), (128, True), (256, False)), ((128, False), (128, True))
    assert measured == {
        *((EXTEND_KERNEL, Key(HOPPER, dim, HALF, fp8)) for dim, fp8 in prompts),
        *((DECODE_KERNEL, Key(HOPPER, dim, HALF, fp8)) for dim, fp8 in steps),
    }


def test_every_head_size_has_tiles(capability: int) -> None:
    for kernel in TABLES:
        for dim in (16, 64, 80, 128, 192, 256, 512):
            for item_bytes in (HALF, FLOAT32):
                for fp8 in (False, True):
                    entry = tiles.entry_of(kernel, dim, item_bytes, fp8)
                    assert len({entry.tile, *entry.others}) == 1 + len(entry.others)
                    assert len(sizes_of(entry)) <= 4
                    assert not entry.tile.joins, "which no GPU has shown to be right"
                    for tile in (entry.tile, *entry.others):
                        assert (tile.tokens == 1) == (kernel == DECODE_KERNEL) >= tile.joins
                        assert all(size & (size - 1) == 0 for size in tile[:3])


def test_half_precision_that_was_not_measured_has_others_to_compare(capability: int) -> None:
    for kernel in TABLES:
        for dim in (64, 128, 256, 512):
            for fp8 in (False, True):
                entry = tiles.entry_of(kernel, dim, HALF, fp8)
                assert entry.measured == (len(sizes_of(entry)) == 1)


def test_each_tile_of_decode_steps_is_also_tried_in_the_form_that_joins_pieces(capability: int) -> None:
    """The measured ones, too, which were measured in the other form."""
    for dim in (64, 128, 256, 512):
        for fp8 in (False, True):
            entry = tiles.entry_of(DECODE_KERNEL, dim, HALF, fp8)
            assert {tile._replace(joins=False) for tile in entry.others if tile.joins} == sizes_of(entry)
            assert not tiles.entry_of(DECODE_KERNEL, dim, FLOAT32, fp8).others


def sizes_of(entry: tiles.Entry) -> set[Tile]:
    return {tile for tile in (entry.tile, *entry.others) if not tile.joins}


def test_tiles_of_a_step_have_whole_parts_for_each_head_size(capability: int) -> None:
    """They are made once for all of a model's layers."""
    for item_bytes in (HALF, FLOAT32):
        for fp8 in (False, True):
            tokens = tiles.step_tokens((64, 256, 512), item_bytes, fp8)
            for dim in (64, 256, 512):
                assert tokens % tiles.extend_tile(dim, item_bytes, fp8).tokens == 0


def test_what_an_engine_has_measured_takes_the_place_of_the_table() -> None:
    own, other = tiles.entry_of(EXTEND_KERNEL, 64, HALF, False).tile, Tile(64, 32, 4, 2)
    joining = tiles.entry_of(DECODE_KERNEL, 64, HALF, False).tile._replace(joins=True)
    chosen = [MeasuredTile(EXTEND_KERNEL, 64, HALF, False, 0, other), MeasuredTile(DECODE_KERNEL, 64, HALF, False, 4, joining)]
    assert not tiles.joins_pieces()
    try:
        tiles.use(chosen)
        assert tiles.in_use() == chosen
        assert tiles.extend_tile(48, HALF) == other
        assert tiles.extend_tile(48, FLOAT32) != other
        assert tiles.extend_tile(128, HALF) != other
        assert tiles.decode_tile(64, HALF, group=4) == joining
        assert not tiles.decode_tile(64, HALF, group=8).joins, "what joins pieces depends on the group"
        assert tiles.joins_pieces()
    finally:
        tiles.use([])
    assert tiles.extend_tile(64, HALF) == own


def test_a_forced_tile_is_the_own_threads_alone() -> None:
    own, seen = tiles.decode_tile(64, HALF), list[Tile]()
    with tiles.forced(Tile(1, 16, 1, 1)):
        thread = threading.Thread(target=lambda: seen.append(tiles.decode_tile(64, HALF)))
        thread.start()
        thread.join()
        assert tiles.decode_tile(64, HALF) == Tile(1, 16, 1, 1)
    assert seen == [own] == [tiles.decode_tile(64, HALF)]


@pytest.mark.timeout(LIMIT_S + 30)
def test_tiles_compile_into_registers_and_shared_memory(tmp_path: pathlib.Path) -> None:
    """All of the table where HEARTHD_TEST_SHAPES asks for it; else prompts on 8.9, which has the least of both."""
    asked = () if COMPILES_ALL else ("89", "--entries", "--half", "--kernel", EXTEND_KERNEL)
    told = output_of("tests.engine.kernels.compile_tiles", *asked, limit_s=LIMIT_S, **KERNEL_CACHE)
    lines = [json.loads(text) for text in told.splitlines()]
    assert len(lines) >= (250 if COMPILES_ALL else 8)
    for line in lines:
        key = Key(line["architecture"], line["head_dim"], line["item_bytes"], line["fp8"])
        assert line["shared_bytes"] <= SHARED_BYTES[key.architecture], line
        if key.item_bytes == FLOAT32:  # multiplied without tensor cores
            continue
        assert line["matrix"], line
        if line["is_entry"]:
            limit = SPILLING.get(key, 0) if line["kernel"] == EXTEND_KERNEL else 0
            assert line["stack_bytes"] <= limit, line
        elif key.architecture != HOPPER or key.head_dim != 512:  # whose others are what the table had before
            assert line["stack_bytes"] <= (CANDIDATE_STACK_BYTES if key.head_dim < 512 else 256), line
