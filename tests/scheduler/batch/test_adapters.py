"""LoRA adapters share the chunks of KV, come and go, and no request notices."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.batch.adapters import Adapters
from scheduler.batch.chunk_pool import ChunkPool
from scheduler.batch.plan import StepOutcome
from tests.scheduler.batch.fake_model import Harness, expected_output
from tests.scheduler.batch.params import Params

LONG = Params(ignore_eos=True, max_tokens=30)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 90, length).tolist()


class AdapterHarness(Harness):
    """Writes a mark into the chunks of an adapter that is placed, and checks it for every row that uses the adapter."""

    def __init__(self, **options: int) -> None:
        super().__init__(**options)
        self.dropped: list[int] = []
        self.scheduler.adapters.dropped = self.dropped.append
        self.kv.reclaim = self.scheduler.adapters.give_up_idle

    def place(self, key: str, num_chunks: int = 1) -> bool:
        adapter = self.scheduler.adapters.place(key, num_chunks, self._make_room)
        if adapter is not None:
            for chunk in adapter.chunks.tolist():
                self.model.arena[chunk * 16 : (chunk + 1) * 16] = self.mark(key)
            self.scheduler.adapter_arrived(key)
        return adapter is not None

    def _make_room(self, num_chunks: int) -> int:
        return self.kv.groups[0].give_up_prefixes(num_chunks)

    @staticmethod
    def mark(key: str) -> int:
        return -1000 - int(key)

    def step(self, max_prompt_tokens: int | None = None) -> StepOutcome | None:
        outcome = super().step(max_prompt_tokens)
        self.check()
        return outcome

    def check(self) -> None:
        adapters, table = self.scheduler.adapters, self.scheduler.table
        assert self.chunks.num_drawn == self.kv.num_drawn_chunks + adapters.num_chunks
        rows = dict.fromkeys(adapters.resident, 0)
        for slot, request in self.scheduler.running.requests():
            if not request.adapter:
                assert table.adapter[slot] == -1
                continue
            rows[request.adapter] += 1
            assert table.adapter[slot] == adapters.resident[request.adapter].number
        for key, adapter in adapters.resident.items():
            assert rows[key] == adapter.num_rows
            for chunk in adapter.chunks.tolist():
                assert (self.model.arena[chunk * 16 : (chunk + 1) * 16] == self.mark(key)).all(), "KV lies where an adapter is"
        numbers = [adapter.number for adapter in adapters.resident.values()]
        assert len(set(numbers)) == len(numbers)

    def run_out(self, sizes: dict[str, int]) -> None:
        """Until nothing is left to do, placing adapters as they are wanted."""

        def place_wanted() -> bool:
            placed = [self.place(key, sizes[key]) for key in list(self.scheduler.adapters.wanted)]
            return any(placed)

        for _ in range(10_000):
            placed = place_wanted()
            if self.step() is None and not placed and not place_wanted():  # a step may have found that one has left
                assert not len(self.scheduler.waiting) + self.scheduler.adapters.num_waiting
                return
        raise AssertionError("no end after 10,000 steps")


def test_a_request_waits_for_its_adapter_and_nobody_waits_for_it() -> None:
    harness = AdapterHarness(lease_chunks=8)
    harness.submit(1, prompt_of(5), LONG, adapter="1")
    harness.submit(2, prompt_of(6, 1), LONG)
    assert harness.scheduler.num_waiting == 1, "the adapter is being read, which no room makes faster"
    assert list(harness.scheduler.adapters.wanted) == ["1"]
    outcome = harness.step()
    assert outcome is not None
    assert outcome.request_ids == [2]
    assert 1 in harness.scheduler
    assert harness.place("1", 2)
    assert not list(harness.scheduler.adapters.wanted)
    harness.run()
    for request_id, prompt in ((1, prompt_of(5)), (2, prompt_of(6, 1))):
        assert harness.output[request_id] == expected_output(prompt, LONG, 64)
    harness.check_no_leak()


def test_one_that_is_used_again_needs_no_place() -> None:
    harness = AdapterHarness(lease_chunks=8)
    harness.place("1")
    harness.submit(1, prompt_of(5), LONG, adapter="1")
    assert not list(harness.scheduler.adapters.wanted)
    harness.run()
    assert harness.output[1] == expected_output(prompt_of(5), LONG, 64)


def test_prefixes_are_shared_under_one_adapter_alone() -> None:
    harness = AdapterHarness(lease_chunks=8)
    harness.place("1")
    harness.place("2")
    shorter = Params(max_tokens=1)
    for request_id, adapter in enumerate(("", "1", "2", "1", "")):
        harness.submit(request_id, prompt_of(13), shorter, adapter=adapter)
        harness.run()
    assert harness.cached == {3: 12, 4: 12}, "only where the same adapter, or none, computed it before"


def test_the_least_recently_used_idle_one_leaves_for_another() -> None:
    harness = AdapterHarness(lease_chunks=4)
    for key in ("1", "2"):
        assert harness.place(key, 2)
    harness.submit(1, prompt_of(3), Params(max_tokens=1), adapter="1")
    harness.run()
    assert harness.place("3", 2)
    assert harness.scheduler.adapters.resident.keys() == {"1", "3"}
    assert harness.dropped == [1]


def test_one_that_rows_use_stays_and_another_waits() -> None:
    harness = AdapterHarness(lease_chunks=4)
    harness.place("1", 3)
    harness.submit(1, prompt_of(3), LONG, adapter="1")
    harness.submit(2, prompt_of(3, 2), LONG, adapter="2")
    harness.step()
    assert harness.scheduler.num_waiting == 0
    assert not harness.place("2", 2)
    assert harness.scheduler.num_waiting == 1, "it waits for room"
    version = harness.chunks.version
    while 1 not in harness.finish:
        harness.step()
    assert harness.chunks.version > version, "whoever waits for memory is told"
    assert harness.place("2", 2)
    assert harness.scheduler.adapters.num_without_room == 0
    harness.run()
    assert harness.output[2] == expected_output(prompt_of(3, 2), LONG, 64)


def test_idle_ones_leave_for_kv() -> None:
    harness = AdapterHarness(reserved_chunks=2, lease_chunks=6)
    harness.place("1", 3)
    harness.place("2", 3)
    harness.submit(1, prompt_of(40), LONG)
    harness.run()
    assert harness.dropped
    assert harness.output[1] == expected_output(prompt_of(40), LONG, 64)
    harness.check_no_leak()


def test_cached_prefixes_leave_for_one() -> None:
    harness = AdapterHarness(reserved_chunks=1, lease_chunks=3)
    harness.submit(1, prompt_of(40), Params(ignore_eos=True, max_tokens=8))
    harness.run()
    assert harness.kv.cached_bytes > 0
    assert harness.place("1", 3)


def test_kv_that_does_not_fit_beside_its_own_adapter_fails() -> None:
    harness = AdapterHarness(reserved_chunks=1, lease_chunks=3, max_model_len=64)
    harness.place("1", 3)
    harness.submit(1, prompt_of(40), LONG, adapter="1")
    harness.run()
    assert [request_id for request_id, _ in harness.scheduler.failed] == [1]
    harness.check()


def test_a_head_that_finds_no_room_wakes_nobody() -> None:
    harness = AdapterHarness(reserved_chunks=2, lease_chunks=4)
    harness.place("1", 2)
    harness.submit(1, prompt_of(20), LONG)
    harness.step()
    harness.submit(2, prompt_of(30, 1), LONG, adapter="1")
    harness.step()
    version = harness.chunks.version
    assert not harness.scheduler._may_admit(8)
    harness.scheduler._blocked_version = -1
    assert harness.scheduler._admit() is None
    assert harness.chunks.version == version, "or two models could wake each other for ever"


def test_a_preempted_request_waits_for_its_adapter_anew() -> None:
    harness = AdapterHarness(reserved_chunks=5, lease_chunks=2)
    harness.place("1", 2)
    for request_id in range(1, 5):
        harness.submit(request_id, prompt_of(6, request_id), LONG, adapter="1")
    harness.step()
    assert harness.scheduler.preempt_one()
    while harness.scheduler.num_running:
        harness.scheduler.preempt_one()
    assert harness.scheduler.adapters.give_up_idle(1) == 2
    assert harness.step() is None
    assert harness.scheduler.adapters.num_waiting == 4
    harness.run_out({"1": 2})
    for request_id in range(1, 5):
        assert harness.output[request_id] == expected_output(prompt_of(6, request_id), LONG, 64)
    assert list(harness.finish) == sorted(harness.finish), "in the order in which they came"
    harness.check_no_leak()


def test_requests_that_wait_for_one_can_be_held_and_aborted() -> None:
    harness = AdapterHarness(lease_chunks=2)
    for request_id in (1, 2):
        harness.submit(request_id, prompt_of(5), LONG, adapter="1", constrained=True, held=True)
    assert harness.scheduler.abort(1)
    assert not harness.scheduler.abort(1)
    harness.scheduler.hold(2, held=False)
    harness.place("1")
    outcome = harness.step()
    assert outcome is not None
    assert outcome.request_ids == [2]


def test_no_more_than_the_tables_have_columns_for() -> None:
    adapters = Adapters(ChunkPool(8, 64, 8), most=2)
    assert adapters.place("1", 1) is not None
    assert adapters.place("2", 1) is not None
    adapters.take("1")
    third = adapters.place("3", 1)
    assert third is not None
    assert third.number == 1
    adapters.take("3")
    assert adapters.place("4", 1) is None
    assert adapters.resident.keys() == {"1", "3"}


def test_a_retired_one_leaves_with_its_last_row() -> None:
    harness = AdapterHarness(lease_chunks=8)
    for key in ("1", "2", "3"):
        harness.place(key)
    harness.submit(1, prompt_of(5), LONG, adapter="1")
    harness.submit(2, prompt_of(6, 1), LONG, adapter="3")
    harness.step()
    adapters = harness.scheduler.adapters
    for key in ("1", "2", "3", "none"):
        adapters.retire(key)
    assert adapters.resident.keys() == {"1", "3"}, "rows use these two"
    assert adapters.keep("3"), "loaded again meanwhile"
    assert not adapters.keep("2")
    harness.run()
    assert adapters.resident.keys() == {"3"}
    for request_id, prompt in ((1, prompt_of(5)), (2, prompt_of(6, 1))):
        assert harness.output[request_id] == expected_output(prompt, LONG, 64)
    harness.check_no_leak()


def test_one_that_queued_requests_wait_for_is_not_dropped_before_they_run() -> None:
    harness = AdapterHarness(lease_chunks=8)
    harness.submit(1, prompt_of(5), LONG, adapter="1")
    harness.place("1")
    harness.scheduler.adapters.retire("1")
    assert harness.scheduler.adapters.is_resident("1")
    harness.run()
    assert harness.output[1] == expected_output(prompt_of(5), LONG, 64)
    assert not harness.scheduler.adapters.resident


def test_chunks_are_adjacent_and_of_the_shortest_run() -> None:
    chunks = ChunkPool(10, 64, 10)
    chunks.take(np.array([2, 5], np.int32), reserved=False)  # free: 0-1, 3-4, 6-9
    adapters = Adapters(chunks)
    placed = adapters.place("1", 2)
    assert placed is not None
    assert placed.chunks.tolist() == [0, 1]
    assert adapters.place("2", 5) is None, "five are free, but not side by side"
    assert not adapters.resident, "what was idle was given up for it"


@pytest.mark.parametrize("lease", [2, 6])
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_texts_do_not_depend_on_adapters_coming_and_going(lease: int, data: st.DataObject) -> None:
    harness = AdapterHarness(reserved_chunks=4, lease_chunks=lease, max_sequences=4)
    sizes = {"1": 1, "2": 2, "3": 1}
    params = Params(ignore_eos=True, max_tokens=12)
    prompts: dict[int, list[int]] = {}
    aborted = set()
    for number in range(data.draw(st.integers(3, 25))):
        match data.draw(st.integers(0, 6)):
            case 0 | 1:
                prompts[number + 1] = prompt_of(data.draw(st.integers(1, 30)), number)
                adapter = data.draw(st.sampled_from(["", "1", "2", "3"]))
                harness.submit(number + 1, prompts[number + 1], params, adapter=adapter)
            case 2:
                for key in list(harness.scheduler.adapters.wanted)[:1]:
                    harness.place(key, sizes[key])
            case 3:
                harness.scheduler.preempt_one()
            case 4 if prompts:
                request_id = data.draw(st.sampled_from(sorted(prompts)))
                if harness.scheduler.abort(request_id):
                    aborted.add(request_id)
            case 5:
                harness.scheduler.adapters.retire(data.draw(st.sampled_from(sorted(sizes))))
            case _:
                harness.step()
        harness.check()
    harness.run_out(sizes)
    assert not harness.scheduler.failed
    for request_id, prompt in prompts.items():
        if request_id not in aborted:
            assert harness.output[request_id] == expected_output(prompt, params, 64)
    harness.check_no_leak()
