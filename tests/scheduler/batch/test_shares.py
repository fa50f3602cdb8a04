"""Tenants that want the same model: places by weight, priority within a tenant only, no tenant's blocks for another."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from scheduler.batch.request import BatchRequest, WaitingQueue
from scheduler.shares import Shares
from tests.scheduler.batch.fake_model import Harness, expected_output
from tests.scheduler.batch.params import Params


def request(request_id: int, tenant: str, weight: float = 1.0, priority: int = 0) -> BatchRequest:
    tokens = np.zeros(1, np.int32)
    return BatchRequest(request_id, tokens, 1, Params(), tenant=tenant, weight=weight, priority=priority, order=request_id)


def served(queue: WaitingQueue, number: int) -> list[int]:
    return [queue.pop().request_id for _ in range(number)]


def test_a_flood_waits_behind_itself() -> None:
    queue = WaitingQueue()
    for request_id in range(100):
        queue.push(request(request_id, "flood"))
    assert served(queue, 3) == [0, 1, 2]
    queue.push(request(100, "late"))
    queue.push(request(101, "late"))
    assert served(queue, 4) == [100, 101, 3, 4]


def test_places_go_by_weight() -> None:
    queue = WaitingQueue()
    for request_id in range(120):
        queue.push(request(request_id, "abc"[request_id % 3], weight=(1.0, 2.0, 3.0)[request_id % 3]))
    counts = Counter("abc"[each % 3] for each in served(queue, 60))
    assert counts == {"a": 10, "b": 20, "c": 30}


def test_priority_counts_within_a_tenant() -> None:
    queue = WaitingQueue()
    queue.push(request(1, "a"))
    queue.push(request(2, "a", priority=5))
    queue.push(request(3, "b", priority=1000))
    queue.push(request(4, "b", priority=1000))
    assert served(queue, 4) == [2, 3, 1, 4]


def test_one_tenant_is_first_come_first_served() -> None:
    queue = WaitingQueue()
    for request_id in range(10):
        queue.push(request(request_id, ""))
    assert queue.withdraw(0)
    assert queue.withdraw(5)
    assert served(queue, 8) == [1, 2, 3, 4, 6, 7, 8, 9]
    assert queue.head() is None
    with pytest.raises(IndexError):
        queue.pop()


def test_what_ended_is_forgotten() -> None:
    queue = WaitingQueue()
    for request_id in range(4):
        queue.push(request(request_id, str(request_id)))
    popped = [queue.pop() for _ in range(4)]
    for each in popped:
        queue.ended(each)
    assert queue.shares.active == {}


def test_crowding() -> None:
    shares = Shares()
    shares.start("a", 1.0)
    shares.start("a", 1.0)
    assert shares.crowding() is None, "alone"
    shares.start("b", 4.0)
    assert shares.crowding() == "a"
    for _ in range(9):
        shares.start("b", 4.0)
    assert shares.crowding() == "b"
    shares.stop("a")
    for _ in range(8):
        shares.stop("b")
    assert shares.crowding() == "b"
    shares.stop("b")
    assert shares.crowding() is None, "the last one of a tenant is left alone"


def test_preemption_takes_from_the_crowding_tenant() -> None:
    """Whatever priority it gives itself; and the texts are the same as ever."""
    harness = Harness(reserved_chunks=5)  # 20 blocks = 80 tokens for four requests of 40
    params = Params(ignore_eos=True, max_tokens=34)
    prompts = {each: np.random.default_rng(each).integers(0, 90, 6).tolist() for each in range(1, 5)}
    harness.submit(1, prompts[1], params, tenant="a", priority=9)
    harness.submit(2, prompts[2], params, tenant="a", priority=9)
    harness.submit(3, prompts[3], params, tenant="a", priority=9)
    harness.submit(4, prompts[4], params, tenant="b")
    ended: list[int] = []
    for _ in range(1000):
        outcome = harness.step()
        if outcome is None:
            break
        ended += [each for each, finish in zip(outcome.request_ids, outcome.finish, strict=False) if finish]
    assert harness.scheduler.num_preemptions > 0
    assert ended.index(4) <= 1, f"b's only request was made to wait: {ended}"
    for each, prompt in prompts.items():
        assert harness.output[each] == expected_output(prompt, params, 64)
    assert harness.scheduler.waiting.shares.active == {}
    harness.check_no_leak()
