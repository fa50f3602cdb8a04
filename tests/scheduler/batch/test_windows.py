"""KV groups with sliding windows: the same text however it is scheduled, and never more blocks than the window needs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.batch.block_pool import BlockPool
from scheduler.batch.chunk_pool import ChunkPool
from scheduler.batch.group_cache import GroupCache
from scheduler.batch.kv_cache import KVCache
from tests.scheduler.batch.fake_model import BLOCK_TOKENS, STATE, Harness, expected_output
from tests.scheduler.batch.params import Params
from tests.scheduler.batch.windowed import LONG, held, hit, make, prompt_of


@pytest.mark.parametrize("full", [True, False])
@pytest.mark.parametrize("window", [1, 3, 4, 5, 8, 30, 200, -1, -4, -10, -32])
def test_a_long_sequence_holds_its_window_only(window: int, full: bool) -> None:
    harness = make(window, full=full)
    prompt = prompt_of(60)
    harness.submit(1, prompt, LONG)
    group, counts = harness.kv.groups[-1], []
    execute = harness.model.execute

    def counted(*args: Any) -> Any:
        counts.append(group.num_held_blocks)
        assert counts[-1] == np.count_nonzero(group.pool.refcount)
        return execute(*args)

    harness.model.execute = counted  # type: ignore[method-assign]
    harness.run()
    assert max(counts) <= min(-(-(abs(window) + 16) // BLOCK_TOKENS) + 1, 128 // BLOCK_TOKENS) == group.most_blocks(128, 16)
    assert counts[-1] <= -(-abs(window) // BLOCK_TOKENS) + 1
    assert harness.output[1] == expected_output(prompt, LONG, 128, windows=harness.windows)
    harness.check_no_leak()


def test_blocks_behind_the_window_leave_the_table() -> None:
    harness = make(8)
    harness.submit(1, prompt_of(50), LONG)
    while harness.scheduler.table.num_computed[0] < 100:
        harness.step()
        position = int(harness.scheduler.table.num_computed[0])
        table = harness.scheduler.table.block_tables[1][0]
        needed = (position + 1 - 8) // BLOCK_TOKENS
        assert (table[: max(0, needed - 1)] == -1).all()
        assert (table[max(0, needed) : position // BLOCK_TOKENS] >= 0).all()
        assert (harness.scheduler.table.block_tables[0][0, : -(-position // BLOCK_TOKENS)] >= 0).all()
    assert harness.kv.held_bytes == held(harness, 0) * 16 + held(harness, 1) * 24


@pytest.mark.parametrize("full", [True, False])
@pytest.mark.parametrize("budget", [1, 3, 16])
def test_chunks_of_any_size(budget: int, full: bool) -> None:
    harness = make(6, full=full, reserved_chunks=60)
    for request_id in range(1, 5):
        harness.submit(request_id, prompt_of(10 + 13 * request_id, request_id), Params(max_tokens=30))
    harness.run(budget)
    for request_id in range(1, 5):
        wanted = expected_output(prompt_of(10 + 13 * request_id, request_id), Params(max_tokens=30), 128, windows=harness.windows)
        assert harness.output[request_id] == wanted
    harness.check_no_leak()


# ---- memory


def test_an_allocation_that_one_group_fails_leaves_no_trace() -> None:
    chunks = ChunkPool(10, 64, lease_chunks=4)
    groups = [GroupCache(BlockPool(chunks, 16, 1), 4), GroupCache(BlockPool(chunks, 24, 1), 4, 8)]
    kv = KVCache(groups)
    version = chunks.version
    assert kv.allocate([8, 40]) is None
    assert (kv.held_bytes, chunks.num_drawn, chunks.version) == (0, 0, version)
    blocks = kv.allocate([8, 6])
    assert blocks is not None
    assert [len(own) for own in blocks] == [8, 6]
    for group in groups:
        group.pool.check()
    kv.release(blocks)
    assert kv.held_bytes == 0


def test_a_group_takes_what_its_sibling_keeps() -> None:
    chunks = ChunkPool(8, 64, lease_chunks=6)
    groups = [GroupCache(BlockPool(chunks, 16, 1), 4), GroupCache(BlockPool(chunks, 32, 1), 4, 8)]
    kv = KVCache(groups)
    blocks = groups[0].allocate(28)
    assert blocks is not None
    groups[0].learn([bytes([i]) * 16 for i in range(28)], blocks)
    groups[0].release(blocks)
    assert kv.num_drawn_chunks == 6
    assert kv.allocate([0, 6]) is not None
    assert groups[1].pool.num_drawn_chunks == 2
    assert groups[0].num_cached_blocks > 8


@pytest.mark.parametrize(("priority", "preempted"), [(1, 1), (0, 2)])
def test_a_chunk_without_blocks_takes_the_place_of_the_least(priority: int, preempted: int) -> None:
    """A sequence grows while a prompt is computed for whose window there was room before."""
    harness = make(100, reserved_chunks=60, more=9)
    first, second = Params(max_tokens=60, ignore_eos=True), Params(max_tokens=4, ignore_eos=True)
    harness.submit(1, prompt_of(4, 1), first)
    harness.step()
    harness.submit(2, prompt_of(80, 2), second, priority=priority)
    while not harness.scheduler.num_preemptions:
        plan_rows = harness.step(4)
        assert plan_rows is not None
    assert harness.scheduler.waiting.get(preempted) is not None
    harness.run(4)
    assert harness.output[1] == expected_output(prompt_of(4, 1), first, 128, windows=harness.windows)
    assert harness.output[2] == expected_output(prompt_of(80, 2), second, 128, windows=harness.windows)
    harness.check_no_leak()


@pytest.mark.parametrize("full", [True, False])
def test_one_sequence_always_fits_what_is_reserved_for_it(full: bool) -> None:
    """Also one that begins with blocks it found: they make room as they fall behind."""
    groups = {"more_groups": [(8, 64, 8)]} if full else {"window": 8, "block_bytes": 64, "reserved_chunks": 8}
    harness = Harness(**({"reserved_chunks": 9, "max_model_len": 128, "max_num_batched_tokens": 16} | groups))  # type: ignore[arg-type]
    params = Params(max_tokens=9, ignore_eos=True)
    harness.submit(1, prompt_of(40), params)
    harness.run()
    text = prompt_of(40) + harness.output[1]
    assert hit(harness, 2, text[:48] + prompt_of(60, 2)) == 48
    assert not harness.scheduler.failed
    assert harness.scheduler.num_preemptions == 0
    harness.check_no_leak()


def test_a_shared_block_that_two_leave_behind_in_one_step() -> None:
    harness = make(30, reserved_chunks=60, more=40)
    prompt, params = prompt_of(25), Params(max_tokens=80, ignore_eos=True)
    hit(harness, 1, prompt)
    for request_id in (2, 3):
        harness.submit(request_id, prompt, params)
    harness.run()
    assert harness.cached[2] == harness.cached[3] == 24
    assert harness.output[2] == harness.output[3] == expected_output(prompt, params, 128, windows=harness.windows)
    harness.check_no_leak()


def test_what_fell_behind_unlearned_is_not_found() -> None:
    """Blocks that an output filled and left behind are free; those of the prompt, and of the last window, are known."""
    harness = make(8, reserved_chunks=60, more=60)
    prompt, params = prompt_of(40), Params(max_tokens=60, ignore_eos=True)
    harness.submit(1, prompt, params)
    harness.run()
    text = prompt + harness.output[1]
    assert hit(harness, 2, text[:70]) == 40
    assert hit(harness, 3, [*text, 5, 6]) >= 96


def test_too_long_for_a_window_group_is_named() -> None:
    harness = Harness(reserved_chunks=10, more_groups=[(30, 64, 3)], max_model_len=128, max_num_batched_tokens=16)
    harness.submit(1, prompt_of(60), Params())
    assert harness.step() is None
    ((request_id, why),) = harness.scheduler.failed
    assert request_id == 1
    assert "13 KV blocks of 64 bytes of a window of 30 tokens" in why


def test_groups_of_unequal_blocks_are_refused() -> None:
    chunks = ChunkPool(10, 64)
    with pytest.raises(ValueError, match=r"block_tokens.*\[4, 8\]"):
        KVCache([GroupCache(BlockPool(chunks, 16, 1), 4), GroupCache(BlockPool(chunks, 16, 1), 8, 8)])
    with pytest.raises(ValueError, match="none given"):
        KVCache([])


@st.composite
def scripts(draw: st.DrawFn) -> list[tuple[str, int, int]]:
    action = st.sampled_from(
        ["submit", "submit", "step", "step", "step", "abort", "preempt", "lease", "prefixes", "gather", "compact"]
    )
    return draw(st.lists(st.tuples(action, st.integers(0, 60), st.integers(0, 5)), max_size=60))


WINDOWS = st.one_of(st.integers(1, 12), st.integers(13, 70), st.integers(-40, -1), st.just(STATE))  # below 0: of chunks
GROUPS = st.lists(st.tuples(WINDOWS, st.sampled_from([16, 32, 64, 24, 100])), min_size=0, max_size=2)


@settings(max_examples=150, deadline=None)
@given(
    scripts(),
    st.integers(1, 33),
    st.one_of(st.just(0), WINDOWS),
    st.sampled_from([16, 32, 40]),
    GROUPS,
    st.booleans(),
    st.sampled_from([0, 12]),
)
def test_any_schedule_gives_the_same_text(
    script: list[tuple[str, int, int]],
    budget: int,
    window: int,
    block_bytes: int,
    others: list[tuple[int, int]],
    tight: bool,
    lease_chunks: int,
) -> None:
    def reserve(window: int, block_bytes: int) -> int:
        blocks = 6 if window == STATE else min(16, -(-(abs(window) + 32) // BLOCK_TOKENS) + 1) if window else 16
        return -(-blocks * block_bytes // 64) + -(-block_bytes // 64) + (0 if tight else 10)

    harness = Harness(
        reserved_chunks=reserve(window, block_bytes),
        lease_chunks=lease_chunks,
        max_sequences=5,
        window=window,
        block_bytes=block_bytes,
        more_groups=[(other, size, reserve(other, size)) for other, size in others],
    )
    requests: dict[int, tuple[list[int], Params]] = {}
    aborted = set()
    for action, number, kind in script:
        if action == "submit":
            request_id = len(requests) + 1
            # few different prompts, so that prefixes meet
            prompt = prompt_of(40, kind % 2)[: 1 + number % 40]
            if kind == 3 and requests:  # a conversation goes on
                before = 1 + number % len(requests)
                prompt = (requests[before][0] + harness.output[before] + prompt)[:63]
            params = Params(max_tokens=1 + number % 17, min_tokens=kind % 4, ignore_eos=kind == 1)
            whole = expected_output(prompt, params, 64, windows=harness.windows)
            done = number % len(whole) if kind == 5 else 0
            requests[request_id] = (prompt, params)
            harness.submit(request_id, prompt, params, output=whole[:done], tenant="ab"[kind == 4], priority=kind % 2)
        elif action == "abort" and requests:
            request_id = 1 + number % len(requests)
            if harness.scheduler.abort(request_id):
                aborted.add(request_id)
        elif action == "preempt":
            harness.scheduler.preempt_one()
        elif action == "lease":
            harness.chunks.set_lease(max(number % (lease_chunks + 1), harness.chunks.num_drawn))
        elif action == "prefixes":
            harness.kv.give_up_prefixes(kind)
        elif action == "gather":
            harness.compaction.gather(harness.scheduler, kind)
        elif action == "compact":
            harness.compaction.give_up_prefixes(harness.scheduler, kind)
        else:
            harness.step(budget)
        check_pools(harness)
    harness.run(budget)
    failed = {request_id for request_id, _ in harness.scheduler.failed}
    if all(64 % group.block_bytes == 0 for group in harness.kv.groups):
        assert not failed, "the reserved chunks hold one request of full length"
    for request_id, (prompt, params) in requests.items():
        whole = expected_output(prompt, params, 64, windows=harness.windows)
        if request_id in aborted or request_id in failed:
            assert harness.output[request_id] == whole[: len(harness.output[request_id])]
        else:
            assert harness.output[request_id] == whole
    harness.check_no_leak()


def check_pools(harness: Harness) -> None:
    """Counts of each pool are those of the tables' entries; no two groups share a chunk."""
    table, blocks = harness.scheduler.table, harness.scheduler.blocks
    owned = np.zeros(harness.chunks.num_chunks, np.int32)
    for g, group in enumerate(harness.kv.groups):
        group.pool.check()
        owned += (group.pool._home | group.pool._drawn).astype(np.int32)
        count = np.zeros(group.pool.num_blocks, np.int32)
        for slot in np.flatnonzero(table.request_id).tolist():
            start, end = blocks._starts[g][slot], blocks._ends[g][slot]
            entries = table.block_tables[g][slot, start:end]
            assert (entries >= 0).all() or group.snapshot_tokens
            np.add.at(count, entries[entries >= 0], 1)
            assert np.count_nonzero(entries >= 0) <= group.most_blocks(64, 32)
        assert (count == group.pool.refcount).all()
    assert owned.max() <= 1
