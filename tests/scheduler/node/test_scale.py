"""An event costs what it touches, not what there is: lines executed, counted and not timed (see benchmarks/scheduler.py)."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

from scheduler.node import events
from tests.scheduler.node.fake_node import FakeNode, facts


def crowded(num_models: int) -> FakeNode:
    """One device full of busy models, every other model queued for by ten requests."""
    node = FakeNode({"cpu:0": 400}, max_wait_s=10_000.0)
    node.scheduler.validate = lambda: None  # type: ignore[method-assign]
    node.register(*(facts(f"m{index}", 40 + index % 7) for index in range(num_models)))
    for index in range(num_models):
        for _ in range(10):
            node.arrive(f"m{index}")
    while node.loads:
        node.loaded()
    return node


def num_lines(node: FakeNode, kind: type[events.Event], **fields: Any) -> int:
    """Lines executed in the scheduler for one event."""
    count = 0

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal count
        if "scheduler" not in frame.f_code.co_filename:
            return None
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        node.scheduler.handle(kind(now=node.now, cause="test", **fields))
    finally:
        sys.settrace(before)
    return count


def costs(num_models: int) -> dict[str, int]:
    node = crowded(num_models)
    ready = next(view.name for view in node.scheduler.snapshot() if view.state == "ready")
    cold = next(view.name for view in node.scheduler.snapshot() if view.state == "cold")
    running = iter(tuple(node.running))
    queued = next(entry.request_id for entry in node.scheduler.queue() if entry.model == cold)
    arrival = events.RequestFacts(10**6, cold, 10, 10)
    return {
        "arrival, cold": num_lines(node, events.RequestArrived, request=arrival),
        "arrival, ready": num_lines(node, events.RequestArrived, request=events.RequestFacts(10**6 + 1, ready, 10, 10)),
        "finished": num_lines(node, events.RequestFinished, request_id=next(running)),
        "cancelled, running": num_lines(node, events.RequestCancelled, request_id=next(running)),
        "cancelled, queued": num_lines(node, events.RequestCancelled, request_id=queued),
        "time": num_lines(node, events.TimePassed),
        "pin": num_lines(node, events.PinRequested, model=cold),
        "unpin": num_lines(node, events.UnpinRequested, model=cold),
        "load": num_lines(node, events.LoadRequested, model=cold),
        "disable": num_lines(node, events.DisableRequested, model=cold),
        "registered": num_lines(node, events.ModelRegistered, facts=facts("another")),
        "death": num_lines(node, events.EngineDown, device="cpu:0", running=(), reason="test"),
        "up": num_lines(node, events.EngineUp, device="cpu:0", budget_bytes=node.budgets["cpu:0"]),
    }


def test_an_event_costs_no_more_with_ten_times_the_models() -> None:
    few, many = costs(60), costs(600)
    grown = {kind: (few[kind], many[kind]) for kind in few if many[kind] > 1.5 * few[kind] + 20}
    assert grown == {}
    assert all(few.values()), "nothing was counted"
