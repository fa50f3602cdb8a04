"""The text of a request does not depend on how it is scheduled."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.batch.chunk_pool import ChunkPool
from scheduler.batch.plan import FINISH_LENGTH, FINISH_STOP
from tests.scheduler.batch.fake_model import BLOCK_TOKENS, EOS, Harness, expected_output, next_token
from tests.scheduler.batch.params import Params


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 90, length).tolist()


def test_one_request() -> None:
    harness = Harness()
    harness.submit(1, prompt_of(5))
    harness.run()
    assert harness.output[1] == expected_output(prompt_of(5), Params(), 64)
    assert harness.finish[1] in (FINISH_STOP, FINISH_LENGTH)
    harness.check_no_leak()


@pytest.mark.parametrize("budget", [1, 2, 3, 5, 7, 32])
def test_chunked_prefill_changes_nothing(budget: int) -> None:
    harness = Harness()
    for request_id in range(1, 5):
        harness.submit(request_id, prompt_of(3 + 6 * request_id, request_id), Params(ignore_eos=True))
    harness.run(budget)
    for request_id in range(1, 5):
        prompt = prompt_of(3 + 6 * request_id, request_id)
        assert harness.output[request_id] == expected_output(prompt, Params(ignore_eos=True), 64)
    harness.check_no_leak()


def test_decode_goes_on_while_a_long_prompt_is_cut() -> None:
    harness = Harness(max_num_batched_tokens=8)
    harness.submit(1, prompt_of(2), Params(ignore_eos=True, max_tokens=30))
    harness.step()
    harness.submit(2, prompt_of(40, 1), Params(ignore_eos=True))
    for _ in range(5):
        outcome = harness.step()
        assert outcome is not None
        assert outcome.request_ids == [1], "the running request has a token in each step of the other's prefill"
    harness.run()
    assert harness.output[2] == expected_output(prompt_of(40, 1), Params(ignore_eos=True), 64)


def test_preemption_changes_nothing() -> None:
    harness = Harness(reserved_chunks=5)  # 20 blocks = 80 tokens for four requests of 40
    params = Params(ignore_eos=True, max_tokens=34)
    for request_id in range(1, 5):
        harness.submit(request_id, prompt_of(6, request_id), params)
    harness.run()
    assert harness.scheduler.num_preemptions > 0
    for request_id in range(1, 5):
        assert harness.output[request_id] == expected_output(prompt_of(6, request_id), params, 64)
    harness.check_no_leak()


def test_lowest_priority_newest_is_preempted_first() -> None:
    harness = Harness(reserved_chunks=5)
    params = Params(ignore_eos=True, max_tokens=34)
    harness.submit(1, prompt_of(6, 1), params, priority=0)
    harness.submit(2, prompt_of(6, 2), params, priority=0)
    harness.submit(3, prompt_of(6, 3), params, priority=1)
    while not harness.scheduler.num_preemptions:
        harness.step()
    head = harness.scheduler.waiting.head()
    assert head is not None
    assert head.request_id == 2
    harness.run()
    assert harness.finish.keys() == {1, 2, 3}


def test_preempted_waits_in_front() -> None:
    harness = Harness(reserved_chunks=5, max_sequences=4)
    params = Params(ignore_eos=True, max_tokens=34)
    for request_id in range(1, 8):
        harness.submit(request_id, prompt_of(6, request_id), params)
    while not harness.scheduler.num_preemptions:
        harness.step()
    head = harness.scheduler.waiting.head()
    assert head is not None
    assert head.request_id <= 4, "one that has run before waits in front of those that have not"
    harness.run()
    for request_id in range(1, 8):
        assert harness.output[request_id] == expected_output(prompt_of(6, request_id), params, 64)


def test_priority_then_first_come() -> None:
    harness = Harness(max_sequences=1)
    for request_id, priority in ((1, 0), (2, 0), (3, 5), (4, 5)):
        harness.submit(request_id, prompt_of(3, request_id), Params(max_tokens=1), priority=priority)
    harness.run()
    assert list(harness.finish) == [3, 4, 1, 2]


def test_when_a_request_was_admitted_is_told_with_its_first_token() -> None:
    harness = Harness(max_sequences=1)
    for request_id in (1, 2):
        harness.submit(request_id, prompt_of(3, request_id), Params(max_tokens=2, ignore_eos=True))
    began_s = []
    for step in range(4):
        plan = harness.scheduler.plan(step, now_s=100.0 + step)
        assert plan is not None
        ids, bad = harness.model.execute(plan, harness.scheduler.table)
        began_s.append(harness.take_in(plan, ids, bad, None).began_s)
    assert began_s == [{1: 100.0}, {}, {2: 102.0}, {}]


@pytest.mark.parametrize("num_done", [1, 3, 4, 9])
def test_resubmission_goes_on(num_done: int) -> None:
    params = Params(ignore_eos=True, max_tokens=12, min_tokens=2)
    whole = expected_output(prompt_of(7), params, 64)
    harness = Harness()
    harness.submit(1, prompt_of(7), params, output=whole[:num_done])
    harness.run()
    assert harness.output[1] == whole
    assert harness.cached == {}
    harness.check_no_leak()


def stopping_prompt() -> list[int]:
    """A prompt after which EOS comes as third to eighth token."""
    for seed in range(10_000):
        if 3 <= len(expected_output(prompt_of(4, seed), Params(), 64)) <= 8:
            return prompt_of(4, seed)
    raise AssertionError("none found")


def test_end_ids() -> None:
    prompt = stopping_prompt()
    end = len(expected_output(prompt, Params(), 64))
    harness = Harness(reserved_chunks=16)
    harness.submit(1, prompt)
    harness.submit(2, prompt, Params(ignore_eos=True))
    harness.submit(3, prompt, Params(min_tokens=end))
    harness.submit(4, prompt, Params(min_tokens=end - 1))
    third = expected_output(prompt, Params(), 64)[1]
    harness.submit(5, prompt, Params(stop_token_ids=[third]))
    harness.run()
    assert harness.output[1][-1] == EOS
    assert len(harness.output[1]) == end
    assert harness.finish[1] == FINISH_STOP
    assert len(harness.output[2]) == 12
    assert harness.finish[2] == FINISH_LENGTH
    assert len(harness.output[3]) > end
    assert len(harness.output[4]) == end
    assert harness.output[5] == harness.output[1][:2]
    assert harness.finish[5] == FINISH_STOP


def test_max_model_len_ends() -> None:
    harness = Harness(max_model_len=20)
    harness.submit(1, prompt_of(15), Params(ignore_eos=True, max_tokens=100))
    harness.run()
    assert len(harness.output[1]) == 5
    assert harness.finish[1] == FINISH_LENGTH


def test_abort_frees_blocks() -> None:
    harness = Harness(max_sequences=2)
    for request_id in (1, 2, 3):
        harness.submit(request_id, prompt_of(9, request_id), Params(ignore_eos=True))
    harness.step()
    harness.step()
    assert harness.scheduler.abort(1)
    assert harness.scheduler.abort(3)
    assert not harness.scheduler.abort(3)
    assert not harness.scheduler.abort(99)
    harness.run()
    assert harness.finish.keys() == {2}
    assert harness.output[2] == expected_output(prompt_of(9, 2), Params(ignore_eos=True), 64)
    harness.check_no_leak()


def test_bad_row_ends_alone_and_leaves_nothing_cached() -> None:
    harness = Harness()
    harness.submit(1, prompt_of(9, 1), Params(ignore_eos=True))
    harness.submit(2, prompt_of(9, 2), Params(ignore_eos=True))
    plan = harness.scheduler.plan(0)
    assert plan is not None
    ids, bad = harness.model.execute(plan, harness.scheduler.table)
    bad[0] = True
    outcome = harness.scheduler.finish_step(plan, ids, bad)
    assert outcome.bad == [1]
    assert outcome.request_ids == [2]
    harness.output[2] += outcome.ids
    harness.run()
    assert harness.output[2] == expected_output(prompt_of(9, 2), Params(ignore_eos=True), 64)
    harness.check_no_leak()
    harness.submit(3, prompt_of(9, 1))
    harness.run()
    assert 3 not in harness.cached


def test_more_sequences_than_tokens_in_a_step() -> None:
    harness = Harness(max_sequences=8, max_num_batched_tokens=3, reserved_chunks=16)
    params = Params(ignore_eos=True, max_tokens=6)
    for request_id in range(1, 9):
        harness.submit(request_id, prompt_of(2, request_id), params)
    harness.run()
    for request_id in range(1, 9):
        assert harness.output[request_id] == expected_output(prompt_of(2, request_id), params, 64)


def test_a_request_that_can_never_fit_is_named() -> None:
    harness = Harness(reserved_chunks=2)  # 8 blocks = 32 tokens
    harness.submit(1, prompt_of(40))
    harness.submit(2, prompt_of(5, 2), Params(max_tokens=2))
    harness.run()
    assert [request_id for request_id, _ in harness.scheduler.failed] == [1]
    assert "10 KV blocks" in harness.scheduler.failed[0][1]
    assert 2 in harness.finish
    harness.check_no_leak()


def test_admitted_in_the_same_step_but_without_room_waits() -> None:
    harness = Harness(reserved_chunks=4, max_num_batched_tokens=64)  # 16 blocks: one request of 50 tokens
    for request_id in (1, 2, 3):
        harness.submit(request_id, prompt_of(45, request_id), Params(ignore_eos=True, max_tokens=5))
    harness.run()
    assert harness.scheduler.failed == []
    assert harness.finish.keys() == {1, 2, 3}


def test_waits_for_memory_that_another_model_holds() -> None:
    chunks = ChunkPool(6, 64, lease_chunks=2)
    first, second = Harness(chunks=chunks, reserved_chunks=2), Harness(chunks=chunks, reserved_chunks=2)
    first.submit(1, prompt_of(40), Params(ignore_eos=True, max_tokens=20))
    first.step()
    second.submit(2, prompt_of(50), Params(ignore_eos=True, max_tokens=4))
    assert second.step() is None
    assert chunks.room_chunks == 1, "what it could not use it does not hold"
    assert second.scheduler.failed == []
    assert not second.scheduler.runnable, "it is not tried again before memory moves"
    first.run()
    first.kv.give_up_prefixes(8)
    assert second.scheduler.runnable
    second.run()
    assert second.output[2] == expected_output(prompt_of(50), Params(ignore_eos=True, max_tokens=4), 64)


def test_close_gives_everything_back() -> None:
    harness = Harness(reserved_chunks=4, lease_chunks=4)
    for request_id in range(1, 6):
        harness.submit(request_id, prompt_of(20, request_id))
    harness.step()
    harness.step()
    harness.scheduler.close()
    assert harness.chunks.free.all()
    assert (harness.chunks.num_drawn, harness.chunks.num_reserved) == (0, 0)


@st.composite
def scripts(draw: st.DrawFn) -> list[tuple[str, int, int]]:
    action = st.sampled_from(
        ["submit", "submit", "step", "step", "step", "abort", "preempt", "lease", "prefixes", "gather", "compact"]
    )
    return draw(st.lists(st.tuples(action, st.integers(0, 60), st.integers(0, 5)), max_size=60))


@settings(max_examples=60, deadline=None)
@given(scripts(), st.integers(1, 33), st.sampled_from([16, 24, 40, 100]), st.booleans())
def test_any_schedule_gives_the_same_text(script: list[tuple[str, int, int]], budget: int, block_bytes: int, tight: bool) -> None:
    one_request_chunks = -(-64 // BLOCK_TOKENS * block_bytes // 64) + 1
    reserved_chunks = one_request_chunks if tight else 20
    harness = Harness(reserved_chunks=reserved_chunks, lease_chunks=12, max_sequences=5, block_bytes=block_bytes)
    requests: dict[int, tuple[list[int], Params]] = {}
    aborted = set()
    for action, number, kind in script:
        if action == "submit":
            request_id = len(requests) + 1
            # few different prompts, so that prefixes meet
            prompt = prompt_of(40, kind % 2)[: 1 + number % 40]
            params = Params(max_tokens=1 + number % 17, min_tokens=kind % 4, ignore_eos=kind == 1)
            whole = expected_output(prompt, params, 64)
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
            harness.chunks.set_lease(max(number % 13, harness.chunks.num_drawn))
        elif action == "prefixes":
            harness.kv.give_up_prefixes(kind)
        elif action == "gather":
            harness.compaction.gather(harness.scheduler, kind)
        elif action == "compact":
            harness.compaction.give_up_prefixes(harness.scheduler, kind)
        else:
            harness.step(budget)
        harness.kv.groups[0].pool.check()
    harness.run(budget)
    failed = {request_id for request_id, _ in harness.scheduler.failed}
    for request_id, (prompt, params) in requests.items():
        whole = expected_output(prompt, params, 64)
        if request_id in aborted or request_id in failed:
            assert harness.output[request_id] == whole[: len(harness.output[request_id])]
        else:
            assert harness.output[request_id] == whole
            assert harness.finish[request_id] == (FINISH_STOP if ends(whole, params) else FINISH_LENGTH)
    if tight or block_bytes <= 40:
        assert not failed, "the reserved chunks hold one request of full length"
    harness.check_no_leak()


def ends(whole: list[int], params: Params) -> bool:
    return whole[-1] == EOS and not params.ignore_eos and len(whole) > params.min_tokens


def test_fake_model_depends_on_every_token() -> None:
    assert len({next_token([1, 2, 3]), next_token([1, 3, 2]), next_token([0, 2, 3]), next_token([1, 2])}) > 1
