"""Prompts and beginnings of prompts that are computed once: cached prefixes, and several sequences of one prompt."""

from __future__ import annotations

import numpy as np

from tests.scheduler.batch.fake_model import BLOCK_TOKENS, Harness, expected_output
from tests.scheduler.batch.params import Params


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 90, length).tolist()


def test_prefix_hit_changes_nothing_but_the_work() -> None:
    harness = Harness(reserved_chunks=16)
    prompt = prompt_of(21)
    harness.submit(1, prompt)
    harness.run()
    before = harness.model.num_computed_tokens
    harness.submit(2, prompt)
    harness.run()
    assert harness.output[2] == harness.output[1]
    assert harness.cached == {2: 20}
    assert harness.model.num_computed_tokens - before == 1 + len(harness.output[2]) - 1


def test_wholly_cached_prompt_computes_its_last_block() -> None:
    harness = Harness(reserved_chunks=16)
    prompt = prompt_of(5 * BLOCK_TOKENS)
    for request_id in (1, 2):
        harness.submit(request_id, prompt)
        harness.run()
    assert harness.cached == {2: 4 * BLOCK_TOKENS}, "the block of the last token is computed: its logits are wanted"
    assert harness.output[1] == harness.output[2]


def test_output_is_a_prefix_of_the_next_turn() -> None:
    harness = Harness(reserved_chunks=16)
    harness.submit(1, prompt_of(6), Params(ignore_eos=True, max_tokens=15))
    harness.run()
    follow_up = prompt_of(6) + harness.output[1] + [3, 4]
    harness.submit(2, follow_up)
    harness.run()
    assert harness.cached == {2: 20}
    assert harness.output[2] == expected_output(follow_up, Params(), 64)


def test_salts_never_share() -> None:
    harness = Harness(reserved_chunks=16)
    harness.submit(1, prompt_of(20), tenant="a")
    harness.run()
    harness.submit(2, prompt_of(20), tenant="b")
    harness.run()
    assert harness.cached == {}
    assert harness.output[1] == harness.output[2]


def test_sequences_of_one_prompt_compute_it_once() -> None:
    """n of one request: the first computes the prompt in chunks, the others wait and share its blocks; a different one does not."""
    harness = Harness(max_num_batched_tokens=16)
    prompt = list(range(1, 31))
    for request_id in range(1, 5):
        harness.submit(request_id, prompt, Params(seed=request_id))
    harness.submit(9, [50, 51], Params())
    harness.run()
    outputs = [harness.output[request_id] for request_id in range(1, 5)]
    assert outputs == [expected_output(prompt, Params(), 64)] * 4
    assert [harness.cached.get(request_id, 0) for request_id in range(1, 5)] == [0, 28, 28, 28]
    num_generated = sum(len(output) for output in harness.output.values())
    assert harness.model.num_computed_tokens < 30 + 3 * 2 + 2 + num_generated
    harness.check_no_leak()


def test_the_first_of_several_may_leave() -> None:
    harness = Harness(max_num_batched_tokens=16)
    prompt = list(range(1, 31))
    for request_id in (1, 2, 3):
        harness.submit(request_id, prompt)
    harness.step()
    harness.scheduler.abort(1)
    harness.run()
    assert harness.output[2] == harness.output[3] == expected_output(prompt, Params(), 64)
    harness.check_no_leak()


def test_a_prompt_whose_log_probabilities_are_owed_shares_nothing() -> None:
    harness = Harness(max_num_batched_tokens=16)
    prompt = list(range(1, 31))
    harness.submit(1, prompt)
    harness.run()
    harness.submit(2, prompt, Params(prompt_logprobs=0))
    harness.submit(3, prompt, Params(prompt_logprobs=0))
    harness.step()
    assert harness.scheduler.table.prompt_logprobs.sum() >= 1
    harness.run()
    assert not harness.scheduler.table.prompt_logprobs[harness.scheduler.table.request_id != 0].any()
    assert 2 not in harness.cached
    assert 3 not in harness.cached
    # again after a crash: the client has them all
    before = harness.model.num_computed_tokens
    harness.submit(4, prompt, Params(prompt_logprobs=0), output=harness.output[2][:3])
    harness.run()
    assert harness.output[4] == harness.output[2]
    assert harness.model.num_computed_tokens - before < 30
