"""Makes the snapshot of the node that the status page shows. The page draws these values and computes only rates from them."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from scheduler.node.views import DeviceView

if TYPE_CHECKING:
    from daemon.node.node import NodeParts

MAX_MODELS = 300  # rows that are sent; a node may have thousands of cold ones, and a viewer gets the table twice a second
NO_STATS = (0, 0, 0, 0)  # used for models without an entry in protocol.Stats.models, because they are not loaded


def snapshot(node: NodeParts) -> dict[str, Any]:
    """Returns the state of the node, its devices and its models as values for JSON. It contains no current time, so two results are
    equal if nothing has changed. Of more than MAX_MODELS models, the cold ones are left out first."""
    rows = node.rows()
    cached = {name: counts[3] for stats in node.engine_events.stats.values() for name, counts in stats.models.items()}
    registered, resident = node.registry.num_adapters, node.adapters_in_memory()
    for row in rows:
        row["kv_cached_bytes"] = cached.get(row["name"], 0) * max(1, len(row.get("devices", ())))
        if (num_adapters := registered.get(row["name"], 0)) or row["name"] in resident:
            row["num_adapters"], row["adapters"] = num_adapters, resident.get(row["name"], {})
    shown = rows if len(rows) <= MAX_MODELS else sorted(rows, key=lambda row: (row["state"] == "cold", row["name"]))[:MAX_MODELS]
    healthy, _ = node.health()
    ready, body = node.ready()
    metric = node.metric
    return {
        "node": {
            "started": round(node.started_unix_s, 3),
            "healthy": healthy,
            "ready": ready,
            "reason": body.get("reason", ""),
            "draining": node.draining,
        },
        "counters": {
            "requests": sum(metric.requests.values()),
            "tokens": sum(metric.generated_tokens.values()),
            "open": len(node.dispatcher.open.by_id),
            "queued": sum(row["queued"] for row in rows),
        },
        "host_tier": node.host_tier_row(),
        "devices": _devices(node, {row["name"]: row for row in rows}),
        "models": shown,
        "states": dict(Counter(row["state"] for row in rows)),
    }


def _devices(node: NodeParts, rows: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    views = {view.name: view for view in node.scheduler.devices()}
    found = []
    for device in node.device_rows():
        row = {key: device[key] for key in ("name", "up", "pid", "restarts", "budget_bytes")}
        row["loading"], row["problem"] = device.get("loading", ""), device.get("problem", "")
        view = views.get(row["name"])
        row["waiting"] = view.num_waiting if view is not None else 0
        row["parts"] = [] if view is None or not view.up else _parts(view, _kv_here(node, row["name"], rows), rows)
        found.append(row)
    return found


def _kv_here(node: NodeParts, device: str, rows: dict[str, dict[str, Any]]) -> dict[str, list[int]]:
    """Returns the engine's figures about each model on a device, as in protocol.Stats.models. For a split model, the figures of its
    first device are returned for each of its devices, because only that device reports them and the model's KV takes as much memory
    on each. rows: the models' rows of the status page, by name."""
    all_stats = node.engine_events.stats
    found = dict(all_stats[device].models) if device in all_stats else {}
    for name, row in rows.items():
        leader, *others = row.get("devices") or [""]
        if device in others and leader in all_stats and (counts := all_stats[leader].models.get(name)) is not None:
            found[name] = counts
    return found


def _parts(device: DeviceView, stats: dict[str, list[int]], rows: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the parts into which a device's budget is divided, each with its kind, model ("": none) and bytes. The bytes add up
    to the budget. stats: the engine's figures for each model (protocol.Stats.models). rows: the models' rows of the status page, by
    name.

    Kinds: work (work space), weights, kv (of running sequences), cache (cached prefixes), reserved (KV that a model has reserved
    and does not use), free (what all models on the device may use)."""
    parts: list[dict[str, Any]] = [{"kind": "work", "model": "", "bytes": device.work_space_chunks * device.chunk_bytes}]
    for model in sorted(device.held):
        held_bytes = device.held[model] * device.chunk_bytes
        row = rows.get(model, {"weights_bytes": held_bytes, "devices": ()})
        weights_bytes = min(held_bytes, row["weights_bytes"] // max(1, len(row["devices"])))
        kv_bytes, _, _, cached_bytes = stats.get(model, NO_STATS)
        reserved_bytes = max(0, held_bytes - weights_bytes - kv_bytes - cached_bytes)
        kinds = (("weights", weights_bytes), ("kv", kv_bytes), ("cache", cached_bytes), ("reserved", reserved_bytes))
        parts += [{"kind": kind, "model": model, "bytes": size} for kind, size in kinds if size]
    # an engine's figures are up to 0.25 s older than the ledger's
    parts.append({"kind": "free", "model": "", "bytes": max(0, device.budget_bytes - sum(part["bytes"] for part in parts))})
    return parts
