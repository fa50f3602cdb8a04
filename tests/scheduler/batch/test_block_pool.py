"""The ledger of chunks and blocks holds after any sequence of operations."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.batch.block_pool import BlockPool
from scheduler.batch.chunk_pool import ChunkPool, free_runs
from scheduler.batch.group_cache import GroupCache
from scheduler.batch.plan import IntArray

CHUNK_BYTES = 64


def check_ledger(chunks: ChunkPool, pools: list[BlockPool], reserved: list[int]) -> None:
    drawn = [pool.num_drawn_chunks for pool in pools]
    assert chunks.num_drawn == sum(drawn)
    assert chunks.num_drawn <= chunks.lease_chunks
    assert chunks.num_reserved == sum(reserved)
    assert np.count_nonzero(~chunks.free) == sum(drawn) + sum(reserved)
    owned = np.zeros(chunks.num_chunks, np.int32)
    for pool in pools:
        pool.check()
        owned += (pool._home | pool._drawn).astype(np.int32)
    assert owned.max() <= 1, "a chunk has two owners"


def bytes_of(pool: BlockPool, blocks: IntArray) -> set[int]:
    size = pool.block_bytes
    return {byte for block in blocks.tolist() for byte in range(block * size, (block + 1) * size)}


def test_blocks_are_where_they_say() -> None:
    chunks = ChunkPool(8, CHUNK_BYTES, lease_chunks=8)
    pool = BlockPool(chunks, 16, 0)
    blocks = pool.allocate(10)
    assert blocks is not None
    assert len(set(blocks.tolist())) == 10
    assert chunks.num_drawn == 3
    taken = set(np.flatnonzero(~chunks.free).tolist())
    assert {block * 16 // CHUNK_BYTES for block in blocks.tolist()} <= taken


@pytest.mark.parametrize(("block_bytes", "num"), [(24, 8), (40, 4), (64, 3), (100, 1), (192, 1)])
def test_straddling_and_large_blocks(block_bytes: int, num: int) -> None:
    """3 adjacent chunks of 64 bytes hold floor(192 / block_bytes) blocks."""
    chunks = ChunkPool(3, CHUNK_BYTES, lease_chunks=3)
    pool = BlockPool(chunks, block_bytes, 0)
    blocks = pool.allocate(num)
    assert blocks is not None
    pool.check()
    assert pool.allocate(1) is None
    pool.check()


def test_reserved_chunks_are_adjacent_and_stay() -> None:
    chunks = ChunkPool(10, CHUNK_BYTES, lease_chunks=2)
    pool = BlockPool(chunks, 40, 6)
    assert free_runs(~chunks.free).tolist() == [[0, 6]]
    assert pool.num_usable == 6 * 64 // 40
    blocks = pool.allocate(pool.num_usable + 2)
    assert blocks is not None
    pool.release(blocks)
    pool.put_free(blocks)
    assert pool.shrink() == 2
    assert chunks.num_reserved == 6
    assert pool.num_usable == 6 * 64 // 40


def test_not_enough_for_the_reservation() -> None:
    chunks = ChunkPool(4, CHUNK_BYTES)
    with pytest.raises(MemoryError, match="5 reserved chunks"):
        BlockPool(chunks, 16, 5)
    assert chunks.free.all()
    assert chunks.num_reserved == 0


def test_a_failed_allocation_holds_nothing() -> None:
    chunks = ChunkPool(8, CHUNK_BYTES, lease_chunks=3)
    pool = BlockPool(chunks, 16, 1)
    version = chunks.version
    assert pool.allocate(17) is None
    assert chunks.num_drawn == 0
    assert chunks.version == version, "or blocked models would try again for ever"
    assert pool.allocate(16) is not None


def test_reserved_chunks_are_used_first_after_sorting() -> None:
    chunks = ChunkPool(8, CHUNK_BYTES, lease_chunks=4)
    pool = BlockPool(chunks, 16, 2)
    blocks = pool.allocate(16)
    assert blocks is not None
    pool.release(blocks)
    pool.put_free(blocks)
    pool.shrink(0)
    first = pool.allocate(8)
    assert first is not None
    assert pool.shrink() == 2, "only reserved chunks are in use"


def test_memory_beyond_the_limit_is_discarded_once() -> None:
    chunks = ChunkPool(8, CHUNK_BYTES, lease_chunks=4, resident_limit=2)
    pool = BlockPool(chunks, 16, 2)
    blocks = pool.allocate(16)
    assert blocks is not None
    assert chunks.take_discards() == []
    pool.release(blocks)
    pool.put_free(blocks)
    assert chunks.take_discards() == [], "all of it is in use"
    pool.shrink()
    assert chunks.take_discards() == [(2, 2)]
    assert chunks.take_discards() == []
    pool.close()
    assert chunks.take_discards() == [], "as much as the limit allows stays where it is"


def test_released_too_often() -> None:
    pool = BlockPool(ChunkPool(4, CHUNK_BYTES, 4), 16, 1)
    blocks = pool.allocate(2)
    assert blocks is not None
    pool.release(blocks)
    with pytest.raises(ValueError, match="more often"):
        pool.release(blocks)


def test_kept_prefixes_of_others_make_room() -> None:
    chunks = ChunkPool(8, CHUNK_BYTES, lease_chunks=4)
    idle = GroupCache(BlockPool(chunks, 16, 1), 4)
    asked = []

    def reclaim(num_chunks: int) -> int:
        asked.append(num_chunks)
        return idle.give_up_prefixes(num_chunks)

    busy = GroupCache(BlockPool(chunks, 16, 1), 4, reclaim=reclaim)
    blocks = idle.allocate(20)
    assert blocks is not None
    idle.learn([bytes([i]) * 16 for i in range(20)], blocks)
    idle.release(blocks)
    assert idle.num_cached_blocks == 20
    assert busy.allocate(12) is not None
    assert asked == [2]
    assert idle.num_cached_blocks >= 8
    check_ledger(chunks, [idle.pool, busy.pool], [1, 1])


OPERATIONS = st.tuples(st.sampled_from(["take", "share", "drop", "shrink", "lease", "undo"]), st.integers(0, 1), st.integers(0, 20))


@settings(max_examples=120, deadline=None)
@given(
    st.lists(OPERATIONS, max_size=50),
    st.tuples(st.sampled_from([8, 16, 24, 40, 64]), st.sampled_from([16, 48, 100, 150])),
    st.tuples(st.integers(0, 4), st.integers(0, 4)),
)
def test_ledger_after_any_operations(
    operations: list[tuple[str, int, int]], block_bytes: tuple[int, int], reserved: tuple[int, int]
) -> None:
    chunks = ChunkPool(20, CHUNK_BYTES, lease_chunks=8)
    pools = [BlockPool(chunks, block_bytes[0], reserved[0]), BlockPool(chunks, block_bytes[1], reserved[1])]
    held: list[tuple[int, IntArray]] = []  # pool, blocks: one reference each
    for action, which, number in operations:
        pool = pools[which]
        if action == "take":
            free, drawn = pool.num_free, chunks.num_drawn
            blocks = pool.allocate(number)
            if blocks is None:
                assert (pool.num_free, chunks.num_drawn) == (free, drawn)
            else:
                held.append((which, blocks))
        elif action == "share" and held:
            owner, blocks = held[number % len(held)]
            pools[owner].refcount[blocks] += 1
            held.append((owner, blocks))
        elif action == "drop" and held:
            owner, blocks = held.pop(number % len(held))
            pools[owner].put_free(pools[owner].release(blocks))
        elif action == "undo":
            state, before = (pool.num_free, chunks.num_drawn, chunks.version), pool.drawn_chunks()
            blocks = pool.allocate(number)
            if blocks is not None:
                pool.undo(blocks, before)
            assert (pool.num_free, chunks.num_drawn, chunks.version) == state
            assert (pool.drawn_chunks() == before).all()
        elif action == "shrink":
            pool.shrink(number)
        elif action == "lease":
            chunks.set_lease(max(chunks.num_drawn, number % 12))
        check_ledger(chunks, pools, list(reserved))
        counts = [np.zeros(pool.num_blocks, np.int32) for pool in pools]
        for owner, blocks in held:
            np.add.at(counts[owner], blocks, 1)
        for pool, count in zip(pools, counts, strict=True):
            assert (pool.refcount == count).all()
        in_use = [bytes_of(pool, np.flatnonzero(pool.refcount)) for pool in pools]
        assert not in_use[0] & in_use[1], "two models share bytes"
    for owner, blocks in held:
        pools[owner].put_free(pools[owner].release(blocks))
    for pool in pools:
        pool.shrink()
        assert pool.num_drawn_chunks == 0, "a chunk without blocks in use goes back"
        pool.close()
    assert chunks.free.all()
    assert (chunks.num_drawn, chunks.num_reserved) == (0, 0)
