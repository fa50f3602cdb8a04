"""Gathers the current values for /metrics, from the scheduler's views and the engines' latest figures."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from daemon.metrics.page import DeviceNow, ModelNow, Now, UpstreamNow
from daemon.process import moment
from daemon.process.version import VERSION
from daemon.upstreams.upstream import UP
from scheduler.node.views import DeviceView, ModelView

if TYPE_CHECKING:
    from daemon.node.node import NodeParts

NO_STATS = (0, 0, 0, 0)  # used for models without an entry in protocol.Stats.models, because they are not loaded


def now(node: NodeParts, model: str | None = None) -> Now:
    """Returns the node's current values for /metrics. model: the only model to include, in which case devices are left out, too;
    None: all models and devices."""
    wanted = [view] if model is not None and (view := node.scheduler.model(model)) is not None else []
    views: Iterable[ModelView] = wanted if model is not None else node.scheduler.snapshot()
    devices = {} if model is not None else _devices(node)
    return Now(
        version=VERSION,
        models={view.name: _model(node, view) for view in views},
        devices=devices,
        tenants_open=Counter(generation.tenant for generation in node.dispatcher.open.by_id.values() if generation.tenant),
        tenants_today=node.quotas.used_today(moment.now()),
        started_unix_s=node.started_unix_s,
        text_jobs=node.text.num_waiting,
        cpu_s=time.process_time(),
        loop_stall_s=node.watch.stall_s,
        draining=node.draining,
        reload_refused=node.reloads.refused is not None,
        state_not_saved=bool(node.state_keeper.problem),
        audit_dropped=node.audit.num_dropped,
        tls_expiry_unix_s=None if node.tls is None else node.tls.certificate.until_unix_s,
        spans_sent=node.traces.counts.num_sent,
        spans_dropped=node.traces.counts.num_dropped,
        host_tier_bytes=_host_tier(node),
        upstreams={
            name: UpstreamNow(upstream.state == UP, upstream.num_active, upstream.num_queued)
            for name, upstream in node.upstreams.by_name.items()
        },
    )


def _host_tier(node: NodeParts) -> dict[str, int]:
    view = node.scheduler.host_tier()
    return {kind: num * view.slot_bytes for kind, num in view.slots.items()}


def _model(node: NodeParts, view: ModelView) -> ModelNow:
    # a split model's figures are reported by its first device, for one share
    stats = node.engine_events.stats.get(view.devices[0]) if view.devices else None
    kv_bytes, running, _, cached_bytes = stats.models.get(view.name, NO_STATS) if stats is not None else NO_STATS
    adapters = {} if stats is None else stats.adapters.get(view.name, {})
    return ModelNow(
        state=view.state,
        device=view.device,
        weights_bytes=view.weights_bytes * view.num_shares,
        kv_bytes=kv_bytes * view.num_shares,
        kv_cached_bytes=cached_bytes * view.num_shares,
        kv_share=kv_share(node, view, kv_bytes) if kv_bytes else 0.0,
        queued=view.queued,
        active=view.active,
        running=min(running, view.active),  # the engine's figure is up to 0.25 s old
        host_bytes=view.kept_bytes,
        saved_kv_tokens=view.saved_kv_tokens,
        adapters=len(adapters),
        adapter_bytes=sum(adapters.values()),
    )


def kv_share(node: NodeParts, view: ModelView, kv_bytes: int) -> float:
    """Returns a model's KV in use as a share, from 0 to 1, of the most that it could use. For a model on one device that is its
    reserved KV and the part of the device's lease that other models do not use; for a split model it is its reserved KV. kv_bytes:
    its KV in use on one device."""
    if len(view.devices) > 1:
        return min(1.0, kv_bytes / max(view.kv_reserved_bytes, kv_bytes, 1))
    device = next((one for one in node.scheduler.devices() if one.name == view.device), None)
    if device is None:
        return 0.0
    room_bytes = view.kv_reserved_bytes + device.lease_chunks * device.chunk_bytes
    for name, counts in node.engine_events.stats[view.device].models.items():
        if name != view.name and (other := node.scheduler.model(name)) is not None:
            room_bytes -= max(0, counts[0] - other.kv_reserved_bytes)
    return min(1.0, kv_bytes / max(room_bytes, kv_bytes, 1))


def chunks_by_state(view: DeviceView, kv_used: int) -> dict[str, int]:
    """Returns the number of a device's chunks by use: work_space, weights, kv and free. kv_used: the chunks of KV in use as the
    engine last reported them, which may be slightly out of date."""
    used = {"work_space": view.work_space_chunks, "weights": view.weights_chunks}
    used["kv"] = min(kv_used, view.total_chunks - sum(used.values()))
    return used | {"free": view.total_chunks - sum(used.values())}


def _resident_bytes(pid: int) -> int:
    """Returns a process's resident memory in bytes, 0 if there is no such process."""
    try:
        fields = Path(f"/proc/{pid}/statm").read_text().split()
    except OSError:
        return 0
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")


def _devices(node: NodeParts) -> dict[str, DeviceNow]:
    views = {view.name: view for view in node.scheduler.devices()}
    kv_chunks = _kv_chunks(node)
    found = {}
    for device in node.devices:
        one = found[device.name] = DeviceNow(up=node.workers[device.name].up, budget_bytes=device.budget_bytes)
        view, stats = views.get(device.name), node.engine_events.stats.get(device.name)
        if view is not None:
            one.work_space_bytes = view.work_space_chunks * view.chunk_bytes
            one.held_bytes = sum(view.held.values()) * view.chunk_bytes
            one.lease_bytes = view.lease_chunks * view.chunk_bytes
            if stats is not None:
                one.preemptions, one.kv_moved_bytes = stats.preemptions, stats.kv_moved_bytes
            one.kv_used_bytes = kv_chunks[device.name] * view.chunk_bytes
            one.chunks = chunks_by_state(view, kv_chunks[device.name])
            one.planned_bytes = view.weights_chunks * view.chunk_bytes + one.kv_used_bytes
            one.measured_bytes = _resident_bytes(node.workers[device.name].pid)
    return found


def _kv_chunks(node: NodeParts) -> Counter[str]:
    """Returns device -> number of chunks that hold KV. For a split model, the first device reports the chunks, and as many are
    counted on each of the others."""
    all_stats = node.engine_events.stats
    found = Counter({device: stats.kv_chunks_used for device, stats in all_stats.items()})
    for view in node.scheduler.snapshot():
        leader, *others = view.devices or ("",)
        if others and leader in all_stats:
            found.update(dict.fromkeys(others, all_stats[leader].share_chunks.get(view.name, 0)))
    return found
