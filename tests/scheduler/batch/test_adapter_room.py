"""An adapter of many chunks finds room among requests that come and go, and no request notices."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from scheduler.batch.adapter_room import AdapterRoom
from scheduler.batch.block_pool import BlockPool
from scheduler.batch.chunk_pool import ChunkPool
from scheduler.batch.step_limits import PATIENT_STEPS
from tests.scheduler.batch.fake_model import expected_output
from tests.scheduler.batch.params import Params
from tests.scheduler.batch.test_adapters import AdapterHarness, prompt_of

LEASE, LARGE = 40, 12  # chunks of the lease, and of the adapter
ADAPTED = 1  # the request that waits for it
NEVER = 120  # steps
MOST_STEPS = PATIENT_STEPS + 60  # a sequence has at most 30 steps


class Crowd(AdapterHarness):
    """Runs as many small requests as find room, with one for adapter 1 beside them."""

    def __init__(self, keeps: bool = True, **options: Any) -> None:
        super().__init__(lease_chunks=LEASE, max_sequences=32, max_num_batched_tokens=64, **options)
        self.room = AdapterRoom(self.chunks, self.compaction) if keeps else None
        self.asked: dict[int, tuple[list[int], Params]] = {}
        self._random, self._next = random.Random(3), 10

    def _make_room(self, num_chunks: int) -> int:
        return self.compaction.give_up_prefixes(self.scheduler, num_chunks)

    def ask(self, request_id: int, prompt: list[int], num_tokens: int, adapter: str = "") -> None:
        self.asked[request_id] = prompt, Params(ignore_eos=True, max_tokens=num_tokens)
        self.submit(request_id, *self.asked[request_id], adapter=adapter)

    def crowd(self) -> None:
        """Asks for more small requests than there is room for, and runs a step."""
        while len(self.scheduler.waiting) < 8:
            self.ask(self._next, prompt_of(self._random.randint(2, 12), self._next), self._random.randint(4, 30))
            self._next += 1
        assert self.step() is not None
        for group in self.kv.groups:
            group.pool.check()

    def look(self, size: int = LARGE) -> bool:
        """Tries to place the adapter, as ServedModels.place_adapter does."""
        if self.place("1", size):
            return True
        if self.room is None or not self.scheduler.adapters.is_overdue("1"):
            return False
        return self.room.keep(self.scheduler, "1", size, [self.scheduler]) and self.place("1", size)

    def end(self) -> None:
        """Runs until all requests have ended, and checks what each was told."""
        while self.scheduler.num_running or len(self.scheduler.waiting):
            assert self.step() is not None
        for request_id, (prompt, params) in self.asked.items():
            assert self.output[request_id] == expected_output(prompt, params, 64, windows=self.windows)


def steps_until_placed(crowd: Crowd, size: int = LARGE) -> int:
    for _ in range(40):
        crowd.crowd()
    crowd.ask(ADAPTED, prompt_of(5), 8, adapter="1")
    for num_steps in range(NEVER):
        if crowd.look(size):
            return num_steps
        assert (crowd.chunks.kept is not None) == (crowd.room is not None and num_steps + 1 >= PATIENT_STEPS)
        crowd.crowd()
    return NEVER


FORMS: list[dict[str, Any]] = [
    {"reserved_chunks": 4},
    {"reserved_chunks": 4, "block_bytes": 24},  # blocks lie across chunks' borders
    {"reserved_chunks": 0, "block_bytes": 40},
    {"reserved_chunks": 4, "more_groups": ((8, 16, 2),)},  # a group with a window
]


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_it_is_placed_in_bounded_time_and_what_runs_beside_it_goes_on(form: dict[str, Any]) -> None:
    crowd = Crowd(**form)
    num_steps = steps_until_placed(crowd)
    assert PATIENT_STEPS <= num_steps <= MOST_STEPS
    assert crowd.chunks.kept is None
    crowd.end()


def test_without_it_none_is_found() -> None:
    """The case is one that takes what is tested here."""
    assert steps_until_placed(Crowd(keeps=False, reserved_chunks=4)) == NEVER


def test_free_chunks_that_the_lease_does_not_cover_are_not_enough() -> None:
    crowd = Crowd(reserved_chunks=4)
    crowd.chunks.set_lease(LEASE - LARGE)
    assert PATIENT_STEPS <= steps_until_placed(crowd) <= MOST_STEPS
    crowd.end()


@pytest.mark.parametrize("how", ["aborted", "larger than the lease"])
def test_nothing_is_kept_for_one_that_nobody_waits_for_or_that_fits_nowhere(how: str) -> None:
    crowd = Crowd(reserved_chunks=4)
    for _ in range(40):
        crowd.crowd()
    crowd.ask(ADAPTED, prompt_of(5), 8, adapter="1")
    size = LARGE if how == "aborted" else LEASE + 1
    for _ in range(PATIENT_STEPS + 1):
        assert not crowd.look(size)
        if crowd.chunks.kept is None:
            crowd.crowd()
    assert (crowd.chunks.kept is not None) == (how == "aborted")
    assert crowd.scheduler.abort(ADAPTED)
    del crowd.asked[ADAPTED]
    assert crowd.chunks.kept is None
    assert crowd.chunks.drawable_chunks == crowd.chunks.room_chunks
    crowd.crowd()
    crowd.end()


def test_chunks_are_kept_for_one_adapter_at_a_time() -> None:
    chunks = ChunkPool(8, 64, lease_chunks=8)
    kept = np.arange(8) < 3
    chunks.keep("first", kept, 3)
    with pytest.raises(ValueError, match="another adapter"):
        chunks.keep("second", kept, 3)
    chunks.release_kept("second")
    assert chunks.drawable_chunks == 5
    chunks.release_kept("first")
    assert chunks.drawable_chunks == 8


@pytest.mark.parametrize("block_bytes", [16, 24, 40, 100])
def test_no_block_in_a_kept_chunk_is_allocated(block_bytes: int) -> None:
    chunks = ChunkPool(12, 64, lease_chunks=12)
    pool = BlockPool(chunks, block_bytes, 2)
    held = pool.allocate(400 // block_bytes)
    assert held is not None
    kept = np.zeros(12, np.bool_)
    kept[np.flatnonzero(pool.drawn_chunks())[:3]] = True
    pool.put_free(pool.release(held[::2]))
    chunks.keep("a", kept, 3)
    pool.put_free(pool.release(held[1::2]))
    taken = []
    while (block := pool.allocate(1)) is not None:
        taken.append(block)
        pool.check()
    assert not pool.num_busy_in(kept)
    assert chunks.num_drawn <= 12 - 3
    num_taken, num_aside = len(taken), pool.num_set_aside
    chunks.release_kept("a")
    if num_aside:
        assert pool.allocate(num_aside) is not None
    pool.check()
    assert num_taken + num_aside <= 12 * 64 // block_bytes
