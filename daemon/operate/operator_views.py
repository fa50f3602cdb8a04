"""Makes the answers for `hearth plan`, `evict --dry-run`, `history`, `top` and `experts`, most of them from what the scheduler
reports. Nothing is changed by this.
"""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from config import units
from daemon.errors import BadRequest
from daemon.operate.page_snapshot import snapshot
from scheduler.node.views import PlacementView

if TYPE_CHECKING:
    from daemon.node.node import NodeParts

SWAPS_SHOWN = 64


def plan(node: NodeParts, name: str) -> dict[str, Any]:
    """Returns, as a JSON object, what loading the model would do now, for example which models would leave. name: the model's name
    or alias. Raises HearthError if there is no such model."""
    model = node.registry.names.local(name)
    found = node.scheduler.plan_load(model, time.monotonic())
    if found is None:
        raise BadRequest("model_not_found", f"There is no model {name!r}.", status=404, details={"name": name})
    registered = node.registry.models[model]
    return asdict(found) | {"notes": [] if registered.entry is None else list(registered.notes)}


def experts(node: NodeParts, name: str) -> dict[str, Any]:
    """Returns, as a JSON object, how many tokens have passed through each expert of a model since the daemon's start. name: the
    model's name or alias. Raises HearthError if there is no such model, or if it is no mixture of experts."""
    model = node.registry.names.local(name)
    shape = node.registry.models[model].shape
    if shape is None or shape.experts is None:
        why = f"Model {model!r} has no experts: every token passes through all of it."
        if shape is None:
            why = f"Model {model!r} cannot be served: {node.registry.models[model].problem}"
        raise BadRequest("no_experts", why, details={"model": model})
    return {"model": model, "num_experts": shape.experts.num_experts, **node.metric.experts.report(node.registry.replicas(model))}


def room(node: NodeParts, text: str, device: str) -> list[dict[str, Any]]:
    """Returns for each device which models would be evicted so that a number of bytes becomes free on it. text: the number of
    bytes, in the form 8GiB or 8589934592. device: the only device to include; "": all devices. Raises HearthError for an invalid
    size or an unknown device."""
    try:
        num_bytes = units.parse_bytes(int(text) if text.isascii() and text.isdigit() else text)
    except ValueError as error:
        raise BadRequest("invalid_request", f"bytes: {text!r} {error}") from None
    names = [one.name for one in node.devices]
    if device and device not in names:
        raise BadRequest("not_found", f"There is no device {device!r}; this node has {', '.join(names)}.", status=404)
    plans = [node.scheduler.plan_room(name, num_bytes, time.monotonic()) for name in names if device in ("", name)]
    return [asdict(one) for one in plans if one is not None]


def history(node: NodeParts, name: str) -> list[dict[str, Any]]:
    """Returns the last placements (loads and evictions of models) as rows, oldest first. name: the only model to include; "": all
    models. Raises HearthError for an unknown name."""
    model = node.registry.names.local(name) if name else ""
    return [_placement(node, view) for view in node.scheduler.history(model)]


def top(node: NodeParts) -> dict[str, Any]:
    """Returns the figures that `hearth top` shows: the status page's snapshot, each model's generated tokens since the start, and
    the last SWAPS_SHOWN placements."""
    return {
        "time": round(time.time(), 3),
        **snapshot(node),
        "tokens": dict(node.metric.generated_tokens),
        "swaps": [_placement(node, view) for view in node.scheduler.history()[-SWAPS_SHOWN:]],
    }


def _placement(node: NodeParts, view: PlacementView) -> dict[str, Any]:
    """Returns a placement (a load or eviction) as a row for JSON. Its times are Unix seconds, and the memory that each victim frees
    is in bytes."""
    row = asdict(view)
    chunk_bytes = int(node.config.chunk_bytes)
    row["victims"] = [
        {"name": one.name, "score": one.score, "bytes": one.chunks * chunk_bytes, "busy": one.busy, "idle_s": one.idle_s}
        for one in view.victims
    ]
    row["begun"] = node.unix_s(view.begun)
    row["ended"] = None if view.ended is None else node.unix_s(view.ended)
    row["waited_s"] = round(view.waited_s, 3)
    return row
