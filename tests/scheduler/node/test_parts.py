"""The pure parts: eviction, ledger, placement, costs, heap, residency."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.node import device_choice, eviction, residency
from scheduler.node.costs import LoadCosts, Rate
from scheduler.node.device_choice import Option
from scheduler.node.eviction import Resident, Target
from scheduler.node.lazy_heap import LazyHeap
from scheduler.node.ledger import DeviceLedger, Size, arithmetic, size_of
from tests.scheduler.node.fake_node import MIB, facts


def resident(name: str, chunks: int, value: float = 1.0, *, busy: bool = False, evictable: bool = True, work: int = 0) -> Resident:
    return Resident(name, chunks, work, value, 0.0, evictable, busy)


def chosen(target: Target, *models: Resident) -> list[str] | None:
    victims = eviction.victims(target, models)
    return None if victims is None else [victim.name for victim in victims]


# ---- eviction


def test_nothing_leaves_when_there_is_room() -> None:
    assert chosen(Target(10, 0, 20), resident("a", 10)) == []
    assert chosen(Target(11, 0, 20), resident("a", 10)) == ["a"]


def test_least_value_first_and_ties_by_last_use() -> None:
    assert chosen(Target(5, 0, 30), resident("a", 10, 3), resident("b", 10, 1), resident("c", 10, 2)) == ["b"]
    old, new = resident("new", 10), resident("old", 10)
    old.last_used, new.last_used = 2.0, 1.0
    assert chosen(Target(5, 0, 20), old, new) == ["old"]


def test_idle_before_busy_whatever_the_value() -> None:
    assert chosen(Target(5, 0, 20), resident("busy", 10, 0.1, busy=True), resident("idle", 10, 9.0)) == ["idle"]


def test_superfluous_victims_stay() -> None:
    models = [resident("a", 2, 1), resident("b", 3, 2), resident("c", 10, 3)]
    assert chosen(Target(10, 0, 15), *models) == ["c"]
    assert chosen(Target(12, 0, 15), *models) == ["a", "c"]


def test_none_when_it_cannot_be() -> None:
    assert chosen(Target(10, 0, 15), resident("pinned", 10, evictable=False), resident("a", 4)) is None
    assert chosen(Target(16, 0, 15)) is None


def test_a_large_work_space_leaves_with_its_model() -> None:
    models = [resident("a", 10, 1), resident("b", 2, 2, work=10)]
    assert chosen(Target(5, 1, 22), *models) == ["a"]
    assert chosen(Target(12, 1, 23), *models) == ["b"]


@given(
    sizes=st.lists(st.tuples(st.integers(1, 20), st.integers(0, 9), st.booleans(), st.integers(0, 5)), max_size=7),
    need=st.integers(1, 60),
    room=st.integers(1, 80),
)
@settings(max_examples=300, deadline=None)
def test_eviction_frees_enough_none_too_many_and_finds_a_way_if_there_is_one(
    sizes: list[tuple[int, int, bool, int]], need: int, room: int
) -> None:
    models = [
        resident(str(index), chunks, value, evictable=may, work=work) for index, (chunks, value, may, work) in enumerate(sizes)
    ]

    def fits(leaving: set[str]) -> bool:
        stay = [model for model in models if model.name not in leaving]
        work = max([model.work_space_chunks for model in stay], default=0)
        return sum(model.chunks for model in stay) + need + max(work, 2) <= room

    names = chosen(Target(need, 2, room), *models)
    if names is None:
        assert not fits({model.name for model in models if model.evictable})
        return
    assert fits(set(names))
    assert all(model.evictable for model in models if model.name in names)
    assert not any(fits(set(names) - {name}) for name in names), "one of them could have stayed"


def test_value_is_priority_times_rate_times_reload_per_byte() -> None:
    assert eviction.value(2.0, 3.0, 4.0, 8) == 3.0
    assert eviction.value(1.0, 1.0, 1.0, 0) == 1.0


# ---- ledger


def test_sizes_are_rounded_up_to_chunks() -> None:
    size = size_of(facts("a", weights_mib=3, max_model_len=2049, work_space_bytes=1), 2 * MIB)
    assert size == Size(weights_chunks=2, kv_chunks=3, work_space_chunks=1)
    assert size.chunks == 5
    floor = size_of(facts("a", kv_floor_tokens=10 * 1024), 2 * MIB)
    assert floor.kv_chunks == 6
    windows = facts("a", max_model_len=1 << 20, kv_reserved_bytes=6 * MIB)
    assert size_of(windows, 2 * MIB).kv_chunks == 4
    assert "of at most 1024 bytes" in arithmetic(windows, 2 * MIB, {"cpu:0": 4 * MIB})
    assert "of 1024 bytes" in arithmetic(facts("a"), 2 * MIB, {"cpu:0": 4 * MIB})


def test_the_lease_is_everything_left_over() -> None:
    ledger = DeviceLedger(100)
    assert ledger.raise_work_space(10)
    assert ledger.lease_chunks == 90
    ledger.hold("a", Size(30, 5, 10))
    assert ledger.lease_chunks == 55
    ledger.promise(7, 20, 10)
    assert ledger.lease_chunks == 35
    assert ledger.room_for(7) == 100
    assert ledger.room_for(8) == 80
    ledger.withdraw(7)
    ledger.release("a")
    assert ledger.lease_chunks == 90
    ledger.clear()
    assert ledger.work_space_chunks == 10


def test_the_work_space_grows_only_into_the_free_lease_and_gives_way() -> None:
    ledger = DeviceLedger(100)
    ledger.hold("a", Size(50, 0, 10))
    assert not ledger.raise_work_space(60)
    assert ledger.raise_work_space(40)
    assert not ledger.raise_work_space(30)
    ledger.hold("b", Size(30, 0, 5))
    assert ledger.work_space_chunks == 20, "shrunk to what is left, not below what a copy needs"
    assert ledger.lease_chunks == 0
    with pytest.raises(ValueError, match="overdraws"):
        ledger.hold("c", Size(15, 0, 0))


def test_a_name_is_held_once() -> None:
    ledger = DeviceLedger(100)
    ledger.hold("a", Size(1, 1, 1))
    with pytest.raises(ValueError, match="a is held already"):
        ledger.hold("a", Size(1, 1, 1))


def test_the_arithmetic_adds_up() -> None:
    text = arithmetic(facts("a", 10), 2 * MIB, {"cpu:0": 15 * MIB, "cpu:1": 18 * MIB})
    assert f"= {18 * MIB} bytes (18.0 MiB)" in text
    assert f"cpu:0 has {14 * MIB} bytes (14.0 MiB): {4 * MIB} bytes (4.0 MiB) too little" in text
    assert "cpu:1 has 18874368 bytes (18.0 MiB): fits" in text


# ---- placement


def test_the_choice_of_a_device() -> None:
    free, roomy = Option("a", [], 5), Option("b", [], 9)
    idle, dear = Option("c", [resident("x", 1, 1)], 9), Option("d", [resident("y", 1, 2)], 9)
    busy = Option("e", [resident("z", 1, 0, busy=True)], 99)
    ranked = [roomy, free, idle, dear, busy]
    for first, second in itertools.combinations(ranked, 2):
        assert device_choice.choose([second, first]) is first
    assert device_choice.choose([]) is None


# ---- costs


def test_load_times_are_learned() -> None:
    costs = LoadCosts(1e9, 0.2)
    assert costs.predict_s("a", 10**9) == pytest.approx(1.2)
    for _ in range(30):
        costs.learn("a", 10**9, 4.2)
    assert costs.predict_s("a", 10**9) == pytest.approx(4.2)
    assert costs.predict_s("b", 10**9) == pytest.approx(4.2, rel=0.01)
    costs.forget("a", 10**9)
    costs.learn("c", 0, 0.1)
    assert costs.predict_s("c", 0) == pytest.approx(0.1)


def test_a_rate_halves_in_a_minute_and_in_a_quarter_of_an_hour() -> None:
    rate = Rate()
    for second in range(3600):
        rate.note(float(second))
    assert rate.per_s(3600.0) == pytest.approx(0.97, abs=0.03)
    assert rate.recent_per_s(3660.0) == pytest.approx(0.5, abs=0.02)
    assert rate.per_s(3600.0 + 900) == pytest.approx(0.235, abs=0.01)


# ---- heap


def test_the_heap_agrees_with_sorting() -> None:
    rng = random.Random(1)
    heap: LazyHeap[str] = LazyHeap()
    model: dict[str, float] = {}
    for _ in range(5000):
        key = f"k{rng.randrange(40)}"
        if rng.random() < 0.6:
            heap.set(key, priority := float(rng.randrange(10)))
            model[key] = priority
        elif rng.random() < 0.7:
            heap.discard(key)
            model.pop(key, None)
        elif model and rng.random() < 0.5:
            first = min(model, key=lambda key: (model[key], key))
            assert heap.pop_due(model[first] - 0.5) is None
            assert heap.pop_due(model[first]) == first
            del model[first]
        ranked = sorted(model, key=lambda key: (model[key], key))
        assert heap.smallest(5) == ranked[:5]
        assert heap.peek() == ((model[ranked[0]], ranked[0]) if ranked else None)
        assert len(heap) == len(model)
    assert len(heap._heap) <= 2 * 40 + 64 + 1, "stale entries are swept"


# ---- residency


def test_groups_are_consistent_and_every_state_is_known() -> None:
    states = {value for name, value in vars(residency).items() if name.isupper() and isinstance(value, str)}
    assert states == residency.ALL
    assert residency.IN_MEMORY | residency.AT_REST == residency.ALL
    assert not residency.IN_MEMORY & residency.AT_REST
    assert residency.RUNNING < residency.IN_MEMORY
    assert not residency.CLOSED & (residency.PLACEABLE | residency.IN_MEMORY)
