"""Places at another server: bounded, given to the tenant that has the fewest, never lost."""

from __future__ import annotations

import asyncio

import pytest

from daemon.errors import HearthError
from daemon.upstreams import via
from daemon.upstreams.upstream import DOWN, UP, Address, Upstream, bounds


def upstream(max_active: int = 1, max_queued: int = 4, max_of_tenant: int = 0, max_wait_s: float = 60.0) -> Upstream:
    limits = bounds(max_active, max_queued, max_of_tenant, max_wait_s)
    return Upstream("big", Address("http://gpu2:8000/v1", "gpu2:8000", "big", ""), limits)


async def started(one: Upstream, tenant: str) -> asyncio.Task[None]:
    task = asyncio.create_task(one.enter(tenant))
    await asyncio.sleep(0)
    return task


async def test_the_tenant_with_the_fewest_is_next() -> None:
    one = upstream(max_active=2, max_queued=8)
    await one.enter("a")
    await one.enter("a")
    waiting = {name: await started(one, name[0]) for name in ("a1", "a2", "b1")}
    one.leave("a")
    await waiting["b1"]
    assert not waiting["a1"].done()
    one.leave("b")
    await waiting["a1"]
    one.leave("a")
    await waiting["a2"]
    assert (one.num_active, one.num_queued) == (2, 0)


async def test_the_queue_is_bounded_for_all_and_for_one() -> None:
    one = upstream(max_queued=3)
    await one.enter("a")
    tasks = [await started(one, "a"), await started(one, "a")]
    with pytest.raises(HearthError, match="2 requests of a wait for big; 2 may") as caught:
        await one.enter("a")
    assert (caught.value.code, caught.value.status) == ("queue_full", 429)
    assert one.refusal("b") is None
    tasks.append(await started(one, "b"))
    with pytest.raises(HearthError, match="max_queued is 3"):
        await one.enter("c")
    assert one.refusal("c") is not None, "fallbacks go on to the next model"
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert one.num_queued == 0


async def test_a_wait_ends_after_max_wait_s() -> None:
    one = upstream(max_wait_s=0.001)
    await one.enter("")
    with pytest.raises(HearthError) as caught:
        await one.enter("")
    assert caught.value.code == "wait_exceeded"
    one.leave("")
    assert (one.num_active, one.num_queued) == (0, 0)


async def test_a_place_given_to_a_client_that_leaves_in_the_same_turn_is_given_on() -> None:
    one = upstream()
    await one.enter("a")
    first, second = await started(one, "a"), await started(one, "b")
    one.leave("a")  # to the first: they have as many
    first.cancel()
    await second
    assert one.num_active == 1
    one.leave("b")
    assert one.num_active == 0


async def test_more_places_by_a_reload_are_given_at_once() -> None:
    one = upstream()
    await one.enter("a")
    waiting = await started(one, "a")
    one.set_bounds(bounds(2, 4, 0, 60.0))
    await waiting
    assert one.num_active == 2


def test_what_fallbacks_are_told() -> None:
    one = upstream()
    assert one.refusal("a") is None, "before the first look it may well answer"
    assert one.set_state(DOWN, "it is on fire")
    refusal = one.refusal("a")
    assert refusal is not None
    assert (refusal.code, refusal.status, refusal.retry_after_s) == ("upstream_unavailable", 503, 5.0)
    assert "gpu2:8000" in refusal.message
    assert "it is on fire" in refusal.message
    assert not one.set_state(DOWN, "still")
    assert one.set_state(UP, "")
    assert one.refusal("a") is None


def test_circles_and_long_ways() -> None:
    assert via.onward([]) == via.OWN
    assert via.onward(["1.1 proxy, 1.0 other", "1.1 third"]) == f"1.1 proxy, 1.0 other, 1.1 third, {via.OWN}"
    for received in ([f"1.1 proxy, {via.OWN}"], [", ".join(f"1.1 n{at}" for at in range(8))], ["1.1 " + "x" * 2000]):
        with pytest.raises(HearthError) as caught:
            via.onward(received)
        assert (caught.value.code, caught.value.status) == ("upstream_loop", 508)
