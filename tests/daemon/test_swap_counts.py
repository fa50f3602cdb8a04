"""What swaps took, as it is counted."""

from __future__ import annotations

from typing import Any

import pytest

from daemon.metrics import page as metrics_page
from daemon.metrics import swaps as swap_counts
from daemon.metrics.counters import Metrics
from daemon.metrics.page import DeviceNow, Now
from daemon.operate.metrics_now import chunks_by_state
from engine import protocol
from scheduler.node import actions
from scheduler.node.views import DeviceView


def load(placement_id: int, reason: str) -> actions.Load:
    sizes: dict[str, Any] = {"weights_chunks": 1, "kv_reserved_chunks": 1, "lease_chunks": 1, "deadline_s": 1.0}
    return actions.Load(cause="t", placement_id=placement_id, model="m", device="cpu:0", reason=reason, **sizes)


def done(placement_id: int, bytes_read: int, **told: Any) -> protocol.LoadDone:
    return protocol.LoadDone(placement_id=placement_id, model="m", seconds=2.0, bytes_read=bytes_read, **told)


def evict(placement_id: int, **fields: Any) -> actions.Evict:
    return actions.Evict(cause="t", placement_id=placement_id, model="m", device="cpu:0", lease_chunks=1, **fields)


def state(new: str) -> actions.StateChanged:
    return actions.StateChanged(cause="t", model="m", old="", new=new, reason="")


def test_loads_by_tier_and_reason_with_their_phases() -> None:
    swaps = swap_counts.SwapCounts()
    swaps.load_sent(load(1, "request"))
    swaps.load_done(done(1, 1000, copy_seconds=0.5, map_seconds=0.25))
    swaps.load_sent(load(2, "resumed"))
    swaps.load_done(done(2, 0, copy_seconds=2.0))
    assert swaps.ins == {("disk", "request"): 1, ("host", "resumed"): 1}
    assert swaps.phase_seconds == {"read": 1.25, "copy": 2.5, "map": 0.25}


def test_evictions_with_age_drain_and_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 10.0
    monkeypatch.setattr(swap_counts.time, "monotonic", lambda: now)
    swaps = swap_counts.SwapCounts()
    swaps.state_changed(state("draining"))
    now = 13.0
    swaps.evict_sent(evict(1, reason="preempted", to="warm", age_s=70.0))
    now = 14.0
    message = protocol.Evicted(placement_id=1, model="m", saved_kv_tokens=300, copy_seconds=0.75)
    swaps.evicted(message)
    assert swaps.outs == {("host", "preempted"): 1}
    assert swaps.phase_seconds == {"drain": 3.0, "save": 0.75, "evict": 0.25}
    assert (sum(swaps.age.counts), swaps.age.total_s) == (1, 70.0)
    assert swaps.pauses == {"m": 1}
    assert swaps.kv_tokens == {("m", "saved"): 300}


def test_a_drain_that_was_called_off_counts_nothing() -> None:
    swaps = swap_counts.SwapCounts()
    swaps.state_changed(state("draining"))
    swaps.state_changed(state("ready"))
    swaps.evict_sent(evict(1, reason="room"))
    assert swaps.phase_seconds["drain"] == 0.0


def test_memory_failures_are_counted_by_device_and_stay_on_the_page_at_zero() -> None:
    metrics = Metrics()
    page = metrics_page.render(metrics, Now("1", {}, {"cpu:0": DeviceNow(True, 1)})).decode()
    assert 'hearth_out_of_memory_total{device="cpu:0"} 0.0' in page
    failed = protocol.LoadFailed(placement_id=1, model="m", error="MemoryError: can't map 5 bytes", permanent=False)
    metrics.swaps.load_failed("cpu:0", failed)
    metrics.swaps.load_failed("cpu:0", protocol.LoadFailed(placement_id=2, model="m", error="ValueError: no", permanent=False))
    metrics.swaps.engine_down("cpu:0", killed_for_memory=True)
    metrics.swaps.engine_down("cpu:0", killed_for_memory=False)
    page = metrics_page.render(metrics, Now("1", {}, {"cpu:0": DeviceNow(True, 1)})).decode()
    assert 'hearth_out_of_memory_total{device="cpu:0"} 2.0' in page


def test_chunks_are_told_by_state_and_what_was_moved_between_them() -> None:
    view = DeviceView("cpu:0", True, 100 << 20, 1 << 20, 100, 10, {"m": 40}, 30, 0, 50, "", 0, "")
    chunks = chunks_by_state(view, kv_used=25)
    assert chunks == {"work_space": 10, "weights": 30, "kv": 25, "free": 35}
    assert chunks_by_state(view, kv_used=99)["free"] == 0, "the engine's figure is of a moment ago"
    now = Now("1", {}, {"cpu:0": DeviceNow(True, 1, kv_moved_bytes=4096, chunks=chunks)})
    page = metrics_page.render(Metrics(), now).decode()
    assert 'hearth_device_chunks{device="cpu:0",state="kv"} 25.0' in page
    assert 'hearth_kv_moved_bytes_total{device="cpu:0"} 4096.0' in page


def test_an_engines_death_ends_what_it_had_and_no_others() -> None:
    swaps = swap_counts.SwapCounts()
    swaps.load_sent(load(1, "request"))
    swaps.engine_down("cpu:1", killed_for_memory=False)
    swaps.load_done(done(1, 1000))
    swaps.load_sent(load(2, "request"))
    swaps.engine_down("cpu:0", killed_for_memory=False)
    assert swaps._load_reason == {}
    assert swaps.ins == {("disk", "request"): 1}


def test_the_kernels_kills_are_seen_once(monkeypatch: pytest.MonkeyPatch) -> None:
    kills = 3
    monkeypatch.setattr(swap_counts, "_oom_kills", lambda: kills)
    watch = swap_counts.KernelKills()
    assert not watch.look()
    kills = 4
    assert watch.look()
    assert not watch.look()
