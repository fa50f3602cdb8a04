"""Counts the costs of swapping models, for /metrics; the dispatcher and the engines' messages supply the numbers."""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from daemon.metrics.histogram import Histogram
from engine import protocol
from scheduler.node import actions

AGE_BUCKETS_S = (1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, 14_400.0, 86_400.0)
DISK, HOST, DEVICE = "disk", "host", "device"


def _pairs() -> defaultdict[tuple[str, str], int]:
    return defaultdict(int)


def _counts() -> defaultdict[str, int]:
    return defaultdict(int)


def _seconds() -> defaultdict[str, float]:
    return defaultdict(float)


@dataclass(slots=True)
class SwapCounts:
    """The counters of loads and evictions since the daemon's start. In keys, `tier` is where a load's weights came from, or where
    weights remain after an eviction: disk, host (the host tier) or device (memory that an ended engine has left). `reason` is why
    the model was loaded or evicted."""

    ins: defaultdict[tuple[str, str], int] = field(default_factory=_pairs)  # (tier, reason), completed loads
    outs: defaultdict[tuple[str, str], int] = field(default_factory=_pairs)  # (tier, reason)
    phase_seconds: defaultdict[str, float] = field(default_factory=_seconds)  # drain, evict, save, read, copy, map
    age: Histogram = field(default_factory=lambda: Histogram(AGE_BUCKETS_S))  # seconds from ready to evicted, of evicted models
    pauses: defaultdict[str, int] = field(default_factory=_counts)  # by model
    paused_requests: defaultdict[str, int] = field(default_factory=_counts)  # by model
    kv_tokens: defaultdict[tuple[str, str], int] = field(default_factory=_pairs)  # (model, saved | restored | recomputed)
    out_of_memory: defaultdict[str, int] = field(default_factory=_counts)  # by device
    _load_reason: dict[int, tuple[set[str], str]] = field(default_factory=dict)  # placement id -> (devices, reason)
    _drains_since_s: dict[str, float] = field(default_factory=dict)  # by model
    _evict_sent_s: dict[int, tuple[set[str], float]] = field(default_factory=dict)  # placement id -> (devices, time)

    def state_changed(self, action: actions.StateChanged) -> None:
        if action.new == "draining":
            self._drains_since_s[action.model] = time.monotonic()
        else:
            self._drains_since_s.pop(action.model, None)

    def load_sent(self, action: actions.Load) -> None:
        self._load_reason[action.placement_id] = set(action.leases), action.reason

    def load_done(self, message: protocol.LoadDone) -> None:
        _, reason = self._load_reason.pop(message.placement_id, (set(), ""))
        self.ins[source_of(message), reason] += 1
        phases = self.phase_seconds
        phases["copy"] += message.copy_seconds
        phases["map"] += message.map_seconds
        phases["read"] += max(0.0, message.seconds - message.copy_seconds - message.map_seconds)

    def load_failed(self, device: str, message: protocol.LoadFailed) -> None:
        self._load_reason.pop(message.placement_id, None)
        if message.error.startswith("MemoryError"):
            self.out_of_memory[device] += 1

    def evict_sent(self, action: actions.Evict) -> None:
        now = time.monotonic()
        self.outs[HOST if action.to == "warm" else DISK, action.reason] += 1
        self._evict_sent_s[action.placement_id] = set(action.leases), now
        self._load_reason.pop(action.placement_id, None)
        if action.age_s:
            self.age.add(action.age_s)
        self.phase_seconds["drain"] += now - self._drains_since_s.pop(action.model, now)
        if action.reason == "preempted":
            self.pauses[action.model] += 1

    def evicted(self, message: protocol.Evicted) -> None:
        now = time.monotonic()
        self.phase_seconds["save"] += message.copy_seconds
        took_s = now - self._evict_sent_s.pop(message.placement_id, (set(), now))[1]
        self.phase_seconds["evict"] += max(0.0, took_s - message.copy_seconds)
        self.kv_tokens[message.model, "saved"] += message.saved_kv_tokens

    def engine_down(self, device: str, killed_for_memory: bool) -> None:
        """Forgets the loads and evictions in progress on a device whose engine has ended, because they will get no answer. Those of
        a model split over several devices are forgotten when the engines of all these devices have ended. killed_for_memory:
        whether the kernel killed the engine for lack of memory, which is counted."""
        for open_ones in (self._load_reason, self._evict_sent_s):
            for placement, (devices, _) in list(open_ones.items()):
                devices.discard(device)
                if not devices:
                    del open_ones[placement]
        if killed_for_memory:
            self.out_of_memory[device] += 1


def source_of(message: protocol.LoadDone) -> str:
    """Returns where a load's weights came from: "disk" if any of them were read from files, otherwise "device" or "host"."""
    return DISK if message.bytes_read else DEVICE if message.adopted else HOST


class KernelKills:
    """Detects that the kernel has killed processes of this machine for lack of memory. `look` returns whether it has killed any
    since the previous call."""

    def __init__(self) -> None:
        self._seen = _oom_kills()

    def look(self) -> bool:
        before, self._seen = self._seen, _oom_kills()
        return self._seen > before


def _oom_kills() -> int:
    """Returns how many processes the kernel has killed for lack of memory since the machine started; 0 if that is unknown."""
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)
