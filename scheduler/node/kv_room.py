"""Makes room for KV and adapters: if requests wait in an engine for either, an idle model may be evicted from its device. It is
loaded again when it is requested.

The eviction is worth its cost if more requests wait than are expected to arrive for the idle model while it is loaded again (its
requests per second times the seconds of its reload). One model is evicted at a time, so that the freed memory has an effect before
the next one is considered.
"""

from __future__ import annotations

from collections.abc import Mapping

from scheduler.node import look, residency
from scheduler.node.node import Device, Model, Node
from scheduler.node.placements import evict

# Free KV memory below this share of all, or below so many prompts of usual length, counts as none.
_SHORT_SHARE, _SHORT_PROMPTS = 0.1, 2


def widen(node: Node, device: Device, waiting: Mapping[str, int], without_room: Mapping[str, int], adapter_bytes: int = 0) -> None:
    """Evicts one idle model from the device if more requests wait there for KV or adapters than are expected to arrive for that
    model while it is loaded again. waiting: model -> number of requests that wait in the engine. without_room: model -> number of
    those requests whose adapter finds no room; adapters cannot use reserved KV, even if it is free. adapter_bytes: the bytes of the
    adapters on the device that running requests use. O(residents)."""
    if not device.up:
        return
    short = [device.resident[name] for name, num in waiting.items() if num and name in device.resident]
    short = [model for model in short if model.copy is not None and not model.copy.facts.is_split]  # those use only their reserve
    short = [model for model in short if len(model.running) - waiting[model.name] < model.window]
    short = [model for model in short if without_room.get(model.name) or is_short(node, device, model, adapter_bytes)]
    if not short:
        return
    device.kv_short_at = node.now
    if device.placements or any(_leaves(model) for model in device.resident.values()):
        return
    idle = [model for model in device.resident.values() if look.evictable(node, model, False, None)]
    idle = [model for model in idle if model not in short]
    if not idle:
        return
    victim = min(idle, key=lambda model: (look.score(node, model, device, _chunks(model)), model.last_used or 0.0, model.name))
    num_waiting = sum(waiting[model.name] for model in short)
    if num_waiting > victim.primary.arrivals.per_s(node.now) * node.reload_s(victim, device):
        names = ", ".join(model.name for model in short)
        what = "adapters" if any(without_room.get(model.name) for model in short) else "KV"
        node.set_state(victim, residency.DRAINING, f"its room becomes {what} for {names}, where {num_waiting} requests wait for it")
        victim.gives_kv = True
        evict(node, victim)


def is_short(node: Node, device: Device, model: Model, adapter_bytes: int = 0) -> bool:
    """Returns whether little of the memory that a model may use for KV on the device (its own reserve, and the lease, which all
    models share) is free: less than a tenth of it, or less than the KV of two prompts of average length takes. Memory of cached
    prefixes counts as free, because they are dropped when it is needed. adapter_bytes: the bytes of the adapters on the device that
    running requests use."""
    total = device.ledger.lease_chunks * node.settings.chunk_bytes
    used = adapter_bytes + sum(max(0, one.kv_running_bytes - _reserved_bytes(node, one)) for one in device.resident.values())
    total += _reserved_bytes(node, model)
    free = total - used - min(model.kv_running_bytes, _reserved_bytes(node, model))
    assert model.copy is not None
    prompt_bytes = model.primary.mean_prompt_tokens * model.copy.facts.kv_bytes_per_token
    return free < max(_SHORT_SHARE * total, _SHORT_PROMPTS * prompt_bytes)


def _reserved_bytes(node: Node, model: Model) -> int:
    assert model.copy is not None
    return model.copy.size.kv_chunks * node.settings.chunk_bytes


def _chunks(model: Model) -> int:
    assert model.copy is not None
    return model.copy.size.chunks


def _leaves(model: Model) -> bool:
    return model.copy is not None and model.copy.evict_sent
