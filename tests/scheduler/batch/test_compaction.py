"""Sparse chunks are emptied: whoever runs notices nothing, and nothing that was kept is lost."""

from __future__ import annotations

import numpy as np
import pytest

from scheduler.batch.chunk_pool import ChunkPool
from tests.scheduler.batch.fake_model import Harness, expected_output
from tests.scheduler.batch.params import Params


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 90, length).tolist()


STAYS = Params(ignore_eos=True, max_tokens=30)


def sparse_model(block_bytes: int = 16, **options: int) -> Harness:
    """Eight sequences ran side by side, six are gone, and nothing of them is kept: every chunk still has something in it."""
    harness = Harness(lease_chunks=50, block_bytes=block_bytes, max_sequences=8, **options)
    for request_id in range(1, 9):
        harness.submit(request_id, prompt_of(3, request_id), STAYS)
    for _ in range(24):
        harness.step()
    for request_id in range(3, 9):
        harness.scheduler.abort(request_id)
    for group in harness.kv.groups:
        group.pool.put_free(np.array(group.prefixes.give_up(1000), np.int32))
    return harness


@pytest.mark.parametrize("block_bytes", [16, 24, 40])
def test_chunks_of_sequences_that_left_come_back_though_each_has_something_in_it(block_bytes: int) -> None:
    harness = sparse_model(block_bytes, reserved_chunks=2)
    (group,) = harness.kv.groups
    drawn = group.pool.num_drawn_chunks
    idle = group.pool.shrink(30)
    given = harness.compaction.gather(harness.scheduler, 30)
    assert given > 0
    assert harness.compaction.moved_bytes > 0
    group.pool.check()
    left = group.pool.num_drawn_chunks
    assert left == drawn - idle - given
    if 64 % block_bytes == 0:  # else gaps stay that are smaller than a block
        assert left == max(0, -(-group.num_held_blocks * block_bytes // 64) - 2)
    assert harness.scheduler.num_preemptions == 0
    harness.run()
    for request_id in (1, 2):
        assert harness.output[request_id] == expected_output(prompt_of(3, request_id), STAYS, 64)
    harness.check_no_leak()


def test_no_more_is_moved_than_is_asked_for() -> None:
    harness = sparse_model(reserved_chunks=1)
    pool = harness.kv.groups[0].pool
    pool.shrink(30)
    drawn = pool.num_drawn_chunks
    assert harness.compaction.gather(harness.scheduler, 1) == 1
    assert pool.num_drawn_chunks == drawn - 1
    assert harness.compaction.moved_bytes <= 64, "a chunk's worth at most"
    assert harness.compaction.gather(harness.scheduler, 0) == 0


def test_full_chunks_are_left_alone() -> None:
    harness = Harness(lease_chunks=12, reserved_chunks=4)
    harness.submit(1, prompt_of(60), Params(ignore_eos=True, max_tokens=4))
    harness.submit(2, prompt_of(60, 2), Params(ignore_eos=True, max_tokens=4))
    harness.step()
    harness.step()
    assert harness.compaction.gather(harness.scheduler, 12) <= 1, "both take 8 of the 12 chunks, and a last block not begun"
    assert harness.compaction.moved_bytes == 0
    harness.run()
    assert harness.output[2] == expected_output(prompt_of(60, 2), Params(ignore_eos=True, max_tokens=4), 64)


def test_kept_prefixes_move_and_are_found_again_in_the_order_they_had() -> None:
    harness = Harness(lease_chunks=30, reserved_chunks=1, max_sequences=8)
    for request_id in range(1, 9):
        harness.submit(request_id, prompt_of(17, request_id), Params(max_tokens=1))
    harness.run()
    (group,) = harness.kv.groups
    for number in range(group.prefixes.num_unheld // 2):  # every second one, so that all chunks are half full
        block = list(group.prefixes._unheld)[number]
        group.prefixes.forget([block])
        group.pool.put_free(np.array([block], np.int32))
    keys, cached = harness.kv.recent_keys(), group.num_cached_blocks
    given = harness.compaction.gather(harness.scheduler, 30)
    assert harness.compaction.moved_bytes > 0
    assert given >= 3
    assert group.num_cached_blocks == cached
    assert harness.kv.recent_keys() == keys, "the same are given up next"
    computed = harness.model.num_computed_tokens
    harness.submit(20, prompt_of(17, 8), Params(max_tokens=1))
    harness.run()
    assert harness.output[20] == expected_output(prompt_of(17, 8), Params(max_tokens=1), 64)
    assert harness.model.num_computed_tokens - computed <= 17
    harness.check_no_leak()


def test_no_more_prefixes_go_than_make_the_chunks_asked_for() -> None:
    """Kept blocks of two prompts lie in turns in every chunk: without moving, a chunk costs blocks of all."""
    chunks = ChunkPool(40, 64, lease_chunks=30)
    harness = Harness(chunks=chunks, reserved_chunks=1, max_sequences=8)
    for request_id in range(1, 9):
        harness.submit(request_id, prompt_of(3, request_id), Params(ignore_eos=True, max_tokens=30))
    harness.run()
    (group,) = harness.kv.groups
    cached, drawn = group.num_cached_blocks, group.pool.num_drawn_chunks
    assert harness.compaction.give_up_prefixes(harness.scheduler, 3) == 3
    assert group.pool.num_drawn_chunks == drawn - 3
    assert group.num_cached_blocks >= cached - 3 * 4, "blocks of three chunks"


def test_window_and_full_groups_both_give() -> None:
    harness = sparse_model(reserved_chunks=2, more_groups=[(8, 24, 2)])  # type: ignore[arg-type]
    drawn = harness.kv.num_drawn_chunks
    assert harness.compaction.gather(harness.scheduler, 40) > 0
    assert harness.kv.num_drawn_chunks < drawn
    for group in harness.kv.groups:
        group.pool.check()
    harness.run()
    for request_id in (1, 2):
        assert harness.output[request_id] == expected_output(prompt_of(3, request_id), STAYS, 64, windows=harness.windows)
    harness.check_no_leak()
