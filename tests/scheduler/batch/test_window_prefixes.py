"""Cached prefixes of a model with sliding windows: what is found, for whom, and how long."""

from __future__ import annotations

import numpy as np
import pytest

from scheduler.batch.group_cache import GroupCache
from tests.scheduler.batch.fake_model import expected_output
from tests.scheduler.batch.params import Params
from tests.scheduler.batch.windowed import LONG, hit, make, prompt_of


@pytest.mark.parametrize("full", [True, False])
def test_a_hit_needs_only_the_last_window(full: bool) -> None:
    harness = make(8, full=full)
    prompt = prompt_of(60)
    assert hit(harness, 1, prompt) == 0
    group = harness.kv.groups[-1]
    # Blocks 0 to 11 are long behind the window of a hit of 56 tokens.
    keys = group.prefixes.known(list(group.prefixes._block_of))
    behind = [block for block in keys if block not in set(keys[-4:])]
    group.prefixes.forget(behind)
    group.pool.put_free(np.array(behind, np.int32))
    assert hit(harness, 2, prompt + prompt_of(20, 7)) == 60
    assert harness.model.num_computed_tokens < 60 + 30 + 6
    harness.check_no_leak()


def test_a_hit_is_as_long_as_all_groups_allow() -> None:
    harness = make(8)
    prompt = prompt_of(60)
    assert hit(harness, 1, prompt) == 0
    full, window = harness.kv.groups
    keys = list(full.prefixes._block_of)

    def forget(group: GroupCache, index: int) -> None:
        blocks = group.prefixes.known([keys[index]])
        group.prefixes.forget(blocks)
        group.pool.put_free(np.array(blocks, np.int32))

    forget(window, 14)
    num, blocks = harness.kv.share(keys[:15])
    assert (num, [len(own) for own in blocks]) == (14, [14, 2])
    harness.kv.release(blocks)
    forget(window, 12)
    assert harness.kv.share(keys[:15])[0] == 12, "13 and 14 blocks need the one that is gone"
    forget(full, 9)
    num, blocks = harness.kv.share(keys[:15])
    assert (num, [len(own) for own in blocks]) == (9, [9, 2])
    assert harness.kv.share(keys[:1])[0] == 1


def test_a_prompt_in_common_is_found_while_the_first_is_far_beyond_it() -> None:
    harness = make(8, reserved_chunks=60)
    common = prompt_of(24)
    harness.submit(1, common + prompt_of(40, 1), LONG)
    for _ in range(20):
        harness.step()
    assert harness.scheduler.table.block_tables[1][0, 5] == -1
    harness.submit(2, common + prompt_of(20, 2), Params(max_tokens=20))
    harness.run()
    assert harness.cached[2] == 24
    for request_id, params in ((1, LONG), (2, Params(max_tokens=20))):
        rest = prompt_of(40, 1) if request_id == 1 else prompt_of(20, 2)
        assert harness.output[request_id] == expected_output(common + rest, params, 128, windows=harness.windows)
    harness.check_no_leak()


@pytest.mark.parametrize("full", [True, False])
def test_one_prompt_several_times_is_computed_once(full: bool) -> None:
    harness = make(6, full=full, more=60, reserved_chunks=60)
    prompt, params = prompt_of(61), Params(max_tokens=30)
    for request_id in (1, 2, 3):
        harness.submit(request_id, prompt, params)
    harness.run()
    assert harness.cached == {2: 60, 3: 60}
    for request_id in (1, 2, 3):
        assert harness.output[request_id] == expected_output(prompt, params, 128, windows=harness.windows)
    harness.check_no_leak()


@pytest.mark.parametrize("full", [True, False])
def test_poisoned_windows_are_not_found(full: bool) -> None:
    """Also not those that were behind the window already."""
    harness = make(8, full=full)
    prompt = prompt_of(60)
    harness.submit(1, prompt, LONG)
    while True:
        plan = harness.scheduler.plan(0)
        assert plan is not None
        ids, bad = harness.model.execute(plan, harness.scheduler.table)
        bad[:] = True
        if harness.scheduler.finish_step(plan, ids, bad).bad:
            break
    harness.check_no_leak()
    assert harness.kv.cached_bytes == 0
    for length in (20, 40, 60):
        assert hit(harness, length, [*prompt[:length], 5]) <= length - 20


def test_tenants_do_not_meet_in_a_window() -> None:
    harness = make(8, full=False)
    prompt = prompt_of(60)
    assert hit(harness, 1, prompt, tenant="a") == 0
    assert hit(harness, 2, prompt, tenant="b") == 0
    assert hit(harness, 3, prompt, tenant="a") > 40
