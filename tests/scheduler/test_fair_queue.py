from __future__ import annotations

import random
from collections import Counter

import pytest

from scheduler.fair_queue import FORGET_ABOVE, FairQueue


def drain(queue: FairQueue, num: int = 10**9) -> list[int]:
    served = []
    while len(served) < num and (request_id := queue.first()) is not None:
        queue.take(request_id)
        served.append(request_id)
    return served


def test_one_tenant_is_first_come_first_served_but_for_priority() -> None:
    queue = FairQueue()
    for request_id, priority in enumerate([0, 0, 2, 1, 2]):
        queue.add(request_id, 5, priority=priority)
    assert len(queue) == 5
    assert drain(queue) == [2, 4, 3, 0, 1]
    assert queue.first() is None


def test_a_flood_waits_behind_itself_and_weights_count() -> None:
    queue = FairQueue()
    for request_id in range(1000):
        queue.add(request_id, 10, "flood")
    for request_id in range(1000, 1030):
        queue.add(request_id, 10, "small", weight=3.0)
    served = Counter("small" if request_id >= 1000 else "flood" for request_id in drain(queue, 40))
    assert served == {"small": 30, "flood": 10}


def test_tenants_may_be_passed_over() -> None:
    queue = FairQueue()
    for request_id, tenant in enumerate("aab"):
        queue.add(request_id, 1, tenant)
    assert queue.first() == 0
    assert queue.first(without={"a"}) == 2
    assert queue.first(without={"a", "b"}) is None
    assert drain(queue) == [0, 2, 1]


def test_what_is_shared_is_work_not_requests() -> None:
    queue = FairQueue()
    for request_id in range(100):
        queue.add(request_id, 30, "long")
        queue.add(1000 + request_id, 10, "short")
    served = Counter("short" if request_id >= 1000 else "long" for request_id in drain(queue, 80))
    assert served["short"] == 60


def test_who_was_away_neither_saved_up_nor_owes() -> None:
    queue = FairQueue()
    for request_id in range(100):
        queue.add(request_id, 1, "busy")
    drain(queue, 50)
    for request_id in range(100, 200):
        queue.add(request_id, 1, "new")
    assert Counter(request_id >= 100 for request_id in drain(queue, 40)) == {True: 20, False: 20}
    # one that sends its next request whenever the last was served gets its share and no more
    queue = FairQueue()
    for request_id in range(100):
        queue.add(request_id, 1, "busy")
    mine = 0
    for turn in range(60):
        if 1000 + mine not in queue._entries:
            queue.add(1000 + mine, 1, "one at a time")
        (request_id,) = drain(queue, 1)
        mine += request_id >= 1000
        assert abs(mine - turn / 2) <= 2


def test_work_whose_size_is_known_only_afterwards_is_charged() -> None:
    queue = FairQueue()
    for request_id in range(20):
        queue.add(request_id, 0.0, "long")
        queue.add(100 + request_id, 0.0, "short", weight=2.0)
    served = []
    for _ in range(12):
        (request_id,) = drain(queue, 1)
        served.append("long" if request_id < 100 else "short")
        queue.charge(served[-1], 10.0, 1.0 if request_id < 100 else 2.0)
    assert Counter(served) == {"short": 8, "long": 4}


def test_withdrawn_requests_are_passed_over_and_may_come_again() -> None:
    queue = FairQueue()
    for request_id in range(4):
        queue.add(request_id, 1, "a" if request_id % 2 else "b")
    assert queue.withdraw(0)
    assert not queue.withdraw(0)
    assert queue.withdraw(2)
    queue.add(0, 1, "b")
    with pytest.raises(KeyError):
        queue.take(2)
    assert sorted(drain(queue)) == [0, 1, 3]


def test_random_runs_lose_nothing_and_remember_few() -> None:
    rng = random.Random(1)
    queue, waiting = FairQueue(), set()
    for request_id in range(5000):
        queue.add(request_id, rng.randrange(1, 50), f"t{rng.randrange(2000)}", rng.choice([0.5, 1, 4]), rng.randrange(3))
        waiting.add(request_id)
        for gone in rng.sample(sorted(waiting), min(len(waiting), rng.randrange(3))):
            if rng.random() < 0.3:
                assert queue.withdraw(gone)
                waiting.remove(gone)
            else:
                (served,) = drain(queue, 1)
                waiting.remove(served)
                break
        assert len(queue) == len(waiting)
    assert set(drain(queue)) == waiting
    queue.add(9999, 1, "last")
    assert len(queue._served) <= FORGET_ABOVE + 2
