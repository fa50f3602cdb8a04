"""Python's garbage collector runs when the engine decides, and collects what an evicted model left once nothing runs."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from engine.loop.garbage_collector import EVERY_STEPS, GarbageCollector


class Node:
    itself: Node


@pytest.fixture
def collector() -> Iterator[GarbageCollector]:
    made = GarbageCollector()
    gc.enable()  # an engine that an earlier test has run in this process has switched it off
    made.start()
    yield made
    gc.unfreeze()
    gc.enable()


def test_it_is_wanted_after_steps_and_evictions(collector: GarbageCollector) -> None:
    assert not gc.isenabled()
    assert not collector.wanted(0)
    assert collector.wanted(1)
    assert not collector.overdue(EVERY_STEPS - 1)
    assert collector.overdue(EVERY_STEPS)
    collector.collect(EVERY_STEPS, busy=True)
    assert not collector.wanted(EVERY_STEPS)
    collector.thaw_later()
    assert collector.wanted(EVERY_STEPS)


def test_what_a_load_froze_goes_when_nothing_runs(collector: GarbageCollector) -> None:
    node = Node()
    node.itself = node
    left = weakref.ref(node)
    gc.freeze()
    del node
    collector.collect(1, busy=False)
    assert left() is not None
    collector.thaw_later()
    collector.collect(2, busy=True)
    assert left() is not None
    collector.collect(3, busy=False)
    assert left() is None
    assert gc.get_freeze_count() > 0
