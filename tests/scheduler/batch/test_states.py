"""A KV group whose blocks hold states: what a sequence holds, where it can be continued, and what is never written again."""

from __future__ import annotations

import numpy as np
import pytest

from scheduler.batch import kv_saving
from tests.scheduler.batch.fake_model import BLOCK_TOKENS, SNAPSHOT_TOKENS, STATE, Harness, expected_output
from tests.scheduler.batch.params import Params
from tests.scheduler.batch.windowed import LONG, held, hit, make, prompt_of


def indices(harness: Harness, slot: int = 0) -> list[int]:
    """Which blocks of tokens of the slot have a state."""
    return np.flatnonzero(harness.scheduler.table.block_tables[1][slot] >= 0).tolist()


def test_a_sequence_holds_its_last_two_states() -> None:
    harness = make(STATE)
    harness.submit(1, prompt_of(60), LONG)
    group = harness.kv.groups[1]
    while harness.step() is not None:
        position = int(harness.scheduler.table.num_computed[0])
        assert held(harness, 1) <= group.most_blocks(128, 16) == 5
        if 60 < position < 120:
            last = (position - 1) // BLOCK_TOKENS
            assert indices(harness)[-1] == last
            assert held(harness, 1) <= 2
    assert harness.output[1] == expected_output(prompt_of(60), LONG, 128, windows=harness.windows)
    harness.check_no_leak()


def test_a_chunk_writes_the_last_two_states_and_those_at_multiples() -> None:
    harness = make(STATE, max_num_batched_tokens=60, more=20)
    harness.submit(1, prompt_of(58), LONG)
    plan = harness.scheduler.plan(0)
    assert plan is not None
    every = SNAPSHOT_TOKENS // BLOCK_TOKENS
    assert indices(harness) == [every - 1, 2 * every - 1, 3 * every - 1, 13, 14]
    harness.scheduler.finish_step(plan, *harness.model.execute(plan, harness.scheduler.table))
    assert indices(harness) == [13, 14]
    harness.run()
    harness.check_no_leak()


def test_a_prefix_is_found_where_a_state_was_left() -> None:
    """At the prompt's end, at multiples, and where a text ended; never between."""
    harness = make(STATE, max_num_batched_tokens=64, more=60, reserved_chunks=60)
    prompt = prompt_of(58)
    harness.submit(1, prompt, Params(max_tokens=21, ignore_eos=True))
    harness.run()
    text = prompt + harness.output[1]
    assert hit(harness, 2, text[:70]) == 56, "states that an output passed are gone"
    assert hit(harness, 6, prompt) == 56
    assert hit(harness, 3, [*prompt[:47], 1]) == 32
    assert hit(harness, 4, prompt[:49]) == 48
    assert hit(harness, 5, [*text, 7, 8]) == 76, "the last full block of 78 computed tokens"
    assert hit(harness, 7, prompt[:15]) == 0
    harness.check_no_leak()


@pytest.mark.parametrize("length", [60, 61])
def test_one_prompt_several_times_is_computed_once(length: int) -> None:
    harness = make(STATE, more=60, reserved_chunks=60, max_num_batched_tokens=64)
    prompt, params = prompt_of(length), Params(max_tokens=30)
    for request_id in (1, 2, 3):
        harness.submit(request_id, prompt, params)
    harness.run()
    assert harness.cached == dict.fromkeys((2, 3), (length - 1) // BLOCK_TOKENS * BLOCK_TOKENS)
    for request_id in (1, 2, 3):
        assert harness.output[request_id] == expected_output(prompt, params, 128, windows=harness.windows)
    harness.check_no_leak()


@pytest.mark.parametrize("steps", [3, 6, 9])
def test_a_preempted_sequence_goes_on_from_its_last_full_block(steps: int) -> None:
    harness = make(STATE)
    prompt = prompt_of(38)
    harness.submit(1, prompt, LONG)
    for _ in range(steps):
        harness.step()
    computed = int(harness.scheduler.table.num_computed[0])
    harness.scheduler.preempt_one()
    before = harness.model.num_computed_tokens
    harness.run()
    assert harness.output[1] == expected_output(prompt, LONG, 128, windows=harness.windows)
    assert harness.model.num_computed_tokens - before == 38 + 90 - 1 - computed // BLOCK_TOKENS * BLOCK_TOKENS
    harness.check_no_leak()


@pytest.mark.parametrize("steps", [3, 4, 7])
def test_saved_states_are_taken_back(steps: int) -> None:
    """All of a sequence that decodes, its partial block included, and of a prompt under way its full blocks."""
    harness, other = make(STATE), make(STATE)
    prompt = prompt_of(42)
    harness.submit(1, prompt, LONG)
    for _ in range(steps):
        harness.step()
    computed, output = int(harness.scheduler.table.num_computed[0]), list(harness.output[1])
    saved = kv_saving.select(harness.scheduler, 1 << 20)
    assert saved.num_lost_tokens == 0
    present = saved.blocks >= 0
    restored = kv_saving.make_room(other.kv, present)
    for g, size in enumerate(group.block_bytes // 4 for group in harness.kv.groups):
        for old, new in zip(saved.blocks[:, g], restored[:, g], strict=True):
            if old >= 0:
                other.model.arena[new * size : (new + 1) * size] = harness.model.arena[old * size : (old + 1) * size]
    kv_saving.take_back(other.kv, saved.keys, saved.num_tokens, restored, np.ones(len(restored), np.bool_))
    other.submit(1, prompt, LONG, output=output)
    other.run()
    assert other.output[1] == expected_output(prompt, LONG, 128, windows=harness.windows)
    assert other.model.num_computed_tokens == 42 + 86 - 1 - computed
    other.check_no_leak()


def test_too_long_for_a_state_group_is_named() -> None:
    harness = Harness(reserved_chunks=10, more_groups=[(STATE, 64, 3)], max_model_len=128, max_num_batched_tokens=16)
    harness.submit(1, prompt_of(60), Params())
    assert harness.step() is None
    ((_, why),) = harness.scheduler.failed
    assert "5 KV blocks of 64 bytes of states; it can hold 3" in why
