"""Which sequences end: as found by a look at every row in every step."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.batch.endings import Endings
from scheduler.batch.plan import FINISH_LENGTH, FINISH_NONE, FINISH_STOP, make_sequence_table, write_sampling
from scheduler.batch.running import Running
from tests.scheduler.batch.params import Params

SLOTS, MAX_LEN, END = 6, 40, 7
REQUESTS = st.builds(
    Params,
    max_tokens=st.integers(1, 12),
    min_tokens=st.integers(0, 3),
    ignore_eos=st.booleans(),
    stop_token_ids=st.sampled_from([(), (), (3,), (3, 4)]),
)
# of each step: who may come, which of those that run get a token, and which tokens
STEPS = st.lists(
    st.tuples(REQUESTS, st.sets(st.integers(0, SLOTS - 1)), st.lists(st.integers(0, 9), min_size=SLOTS, max_size=SLOTS))
)


def expected(params: Params, num_prompt: int, num_tokens: int, token: int) -> int:
    stops = (token == END and not params.ignore_eos) or token in params.stop_token_ids
    if stops and num_tokens > num_prompt + params.min_tokens:
        return FINISH_STOP
    return FINISH_LENGTH if num_tokens >= min(num_prompt + params.max_tokens, MAX_LEN) else FINISH_NONE


@settings(max_examples=200)
@given(STEPS)
def test_no_ending_is_missed_and_none_made_up(steps: list[tuple[Params, set[int], list[int]]]) -> None:
    table = make_sequence_table(SLOTS, MAX_LEN, 4)
    endings = Endings([END], table)
    running: dict[int, tuple[Params, int]] = {}
    for number, (params, chosen, tokens) in enumerate(steps):
        free = [slot for slot in range(SLOTS) if slot not in running]
        if free:
            slot, num_prompt = free[0], 30 + number % 5
            table.request_id[slot], table.num_tokens[slot] = number + 1, num_prompt
            write_sampling(table, slot, params, num_prompt, MAX_LEN)
            endings.join(slot, params)
            running[slot] = params, num_prompt
        sampling = sorted(chosen & running.keys())
        table.num_tokens[sampling] += 1
        ids = tokens[: len(sampling)]
        found = endings.finishes(np.array(sampling, np.int32), ids, np.array(list(running), np.int32))
        wanted = [expected(*running[slot], int(table.num_tokens[slot]), token) for slot, token in zip(sampling, ids, strict=True)]
        assert found == (wanted if any(wanted) else [])
        for slot, finish in zip(sampling, wanted, strict=True):
            if finish:
                endings.leave(slot)
                table.request_id[slot] = 0
                del running[slot]


@pytest.mark.parametrize("step", ["join", "leave"])
def test_what_is_known_of_the_same_slots_is_not_kept_for_others(step: str) -> None:
    """Rows that decode are not looked for again while the same sequences run."""
    table = make_sequence_table(4, MAX_LEN, 4)
    running = Running(table, [None] * 4)
    for slot in (2, 0):
        table.request_id[slot], table.num_tokens[slot], table.num_computed[slot] = slot + 1, 9, 8
        running.join(slot)
    for _ in range(2):
        decode, prefill = running.split(running.slots, table.num_computed, table.num_tokens)
        assert decode is running.slots
        assert not len(prefill)
    if step == "leave":
        table.request_id[2] = 0
        running.drop_gone()
    table.request_id[3], table.num_tokens[3] = 9, 5
    running.join(3)
    decode, prefill = running.split(running.slots, table.num_computed, table.num_tokens)
    assert decode.tolist() == ([2, 0] if step == "join" else [0])
    assert prefill.tolist() == [3]
