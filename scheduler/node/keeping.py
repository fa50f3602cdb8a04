"""Decides what the host tier holds: which models' weights are copied to it while they are read from disk, and whose KV is saved
when a model is evicted from its device. Copies of both kinds compete by one value per byte:

value = priority x uses per second x seconds saved per use / bytes

A use of copied weights is a load; it saves the seconds of a disk read minus those of a copy. The uses per second are the model's
loads per second; while requests wait for the model, one more load is expected within overdue_after_s, the time after which they are
overdue. A model that is never evicted from its device therefore needs no copy, however often it is requested.

A use of saved KV is a request; it saves the computation of one prompt of average length, minus copying its KV back. The uses per
second are the model's requests per second; waiting requests are expected to run within overdue_after_s.

The least valuable copy is dropped first, and among equal ones the oldest, but only to make room for a more valuable copy.
"""

from __future__ import annotations

from scheduler.node import residency
from scheduler.node.events import HostCopiesFound, ModelFacts
from scheduler.node.eviction import value
from scheduler.node.groups import num_other_hosts
from scheduler.node.host_tier import HostCopy, KeptWeights, SavedKV, Slots
from scheduler.node.node import Copy, Device, Model, Node, Placement


def same_files(one: ModelFacts, other: ModelFacts) -> bool:
    """Returns whether copies in host memory that were made with one model's facts may be loaded with the other's: whether
    fingerprint, sizes and division into shares are equal."""
    return _identity(one) == _identity(other)


def _identity(facts: ModelFacts) -> tuple[object, ...]:
    division = (facts.num_ranks, facts.num_stages, facts.expert_parts)
    return facts.fingerprint, facts.weights_bytes, facts.kv_bytes_per_token, division


def found(node: Node, event: HostCopiesFound) -> None:
    """Takes over the copies that an earlier daemon left in host memory. Copies of unknown models, of other files, of split models
    and of further replicas are ignored."""
    for name, copy in event.copies:
        model = node.models.get(name)
        if model is None or model.removed or model.facts.fingerprint != copy.fingerprint:
            continue
        facts = model.facts
        if facts.is_split or facts.replica_of or (isinstance(copy, KeptWeights) and copy.num_bytes != facts.weights_bytes):
            continue
        if node.host.found(name, copy):
            model.story.tell(node.now, node.cause, f"{copy.num_bytes} bytes in host memory are there from before the restart")
            cool(node, model, "its weights are in host memory from before the restart")


# ---- the value of a copy


def loads_per_s(node: Node, model: Model) -> float:
    return model.loads.per_s(node.now) + bool(model.queue) / max(1.0, node.settings.overdue_after_s)


def requests_per_s(node: Node, model: Model) -> float:
    return model.arrivals.per_s(node.now) + len(model.queue) / max(1.0, node.settings.overdue_after_s)


def _device_of(node: Node, model: Model) -> Device | None:
    """Returns the device whose measured costs determine the value of a model's copies in host memory: the one that holds the model,
    else the first one on which the model may be; None if there is none."""
    name = model.copy.leader if model.copy else next(iter(model.devices), "")
    return node.devices.get(name)


def weights_value(node: Node, model: Model, num_bytes: int) -> float:
    """Returns the value per byte of a copy of a model's weights in host memory: the seconds of loading that the copy saves per
    second, times the model's priority, divided by num_bytes. 0.0 if the model can be on no device. num_bytes: the bytes of the
    weights on all devices together; each device loads an equal share."""
    device = _device_of(node, model)
    if device is None:
        return 0.0
    costs, share_bytes = device.costs, num_bytes // model.facts.num_ranks
    saved_s = costs.predict_s(model.name, share_bytes) - costs.predict_from_host_s(model.name, share_bytes)
    return value(model.facts.priority, loads_per_s(node, model), max(0.0, saved_s), num_bytes)


def kv_value(node: Node, model: Model, num_tokens: int, num_bytes: int) -> float:
    device = _device_of(node, model)
    if device is None:
        return 0.0
    per_use = min(float(num_tokens), max(model.mean_prompt_tokens, 1.0))
    saved_s = per_use * device.costs.saved_s_per_token(model.name, num_bytes / max(1, num_tokens))
    return value(model.facts.priority, requests_per_s(node, model), max(0.0, saved_s), num_bytes)


def value_of(node: Node, name: str, copy: HostCopy) -> float:
    model = node.models[name]
    if isinstance(copy, SavedKV):
        return kv_value(node, model, copy.num_tokens, copy.num_bytes)
    return weights_value(node, model, copy.num_bytes)


# ---- at a load


def grants_of_load(node: Node, placement: Placement, left: bool) -> tuple[Slots, KeptWeights | None, SavedKV | None]:
    """Returns what host memory contributes to a load that begins, as three values: the slots in which to store its weights while
    they are read from disk, () if they are not stored; the copy of the weights to load from, None if there is none; the saved KV to
    restore, None if there is none. left: True if all devices still hold the weights of an earlier copy, which was lost when an
    engine died: nothing is then read from disk, so nothing is stored. False: the weights must be read.

    The result is ((), None, None) for loads that do not use host memory. These are the loads of a further replica (any but the
    model's first), of a split model with devices of other hosts, and of a split model that takes copies of experts along, because
    its next load may take other copies."""
    model, host, facts = node.models[placement.model], node.host, placement.facts
    if not host.num_slots or not facts.keeps_weights or num_other_hosts(placement.devices) or placement.copies is not None:
        return (), None, None
    kept = host.weights.get(model.name)
    keep: Slots = ()
    if kept is None and not left:
        num_slots = placement.size.weights_chunks * facts.num_ranks
        num_bytes = facts.all_weights_bytes
        if make_room(node, model, num_slots, weights_value(node, model, num_bytes), whole=True):
            keep = host.grant(placement.id, model.name, num_slots)
    host.lend(model.name, placement.id)
    return keep, kept, host.kv.get(model.name)


def make_room(node: Node, model: Model, num_slots: int, worth: float, whole: bool) -> int:
    """Makes slots of host memory free for a new copy, of the weights or the KV of `model`, which needs num_slots slots. Drops
    copies of other models that are worth less, the least valuable first, until enough slots are free. Returns how many slots the
    new copy gets. worth: the value per byte of the new copy (see the module).

    whole: True: the copy gets all num_slots slots, or none: 0 is returned, and nothing is dropped, if too few can be made free or
    if the copies to drop are together worth more than the new one. False: it gets as many of them as can be made free."""
    host = node.host
    if num_slots <= host.num_free or not num_slots:
        return num_slots
    mine = (worth, model.last_used or 0.0)
    losable: list[tuple[float, float, str, HostCopy]] = []
    for name, copy in host.copies():
        if copy.lent or name == model.name:
            continue
        theirs = (value_of(node, name, copy), node.models[name].last_used or 0.0)
        if theirs < mine:
            losable.append((*theirs, name, copy))
    losable.sort(key=lambda entry: entry[:3])
    chosen, found, loss = [], host.num_free, 0.0
    for entry in losable:
        if found >= num_slots:
            break
        chosen.append(entry)
        found += len(entry[3].slots)
        loss += entry[0] * entry[3].num_bytes
    granted = min(found, num_slots)
    if whole and (found < num_slots or loss > worth * num_slots * node.settings.chunk_bytes):
        return 0
    for _, _, name, copy in chosen:
        give_up(node, name, copy, f"made room for {model.name}")
    return granted


def give_up(node: Node, name: str, copy: HostCopy, reason: str) -> None:
    host, model = node.host, node.models[name]
    if isinstance(copy, SavedKV):
        host.drop_kv(name)
        model.story.tell(node.now, node.cause, f"its saved KV ({copy.num_tokens} tokens) {reason} in host memory")
        return
    host.drop_weights(name)
    model.story.tell(node.now, node.cause, f"its weights {reason} in host memory")
    cool(node, model, f"its weights {reason} in host memory")


def cool(node: Node, model: Model, reason: str) -> None:
    """Updates the state of a model whose state is cold or warm: it is warm if host memory holds the model's weights, else cold.
    Does nothing in any other state. reason: for operators."""
    if model.state == residency.WARM and not node.is_warm(model):
        node.set_state(model, residency.COLD, reason)
    elif model.state == residency.COLD and not model.removed and node.is_warm(model):
        node.set_state(model, residency.WARM, reason)


def drop_all(node: Node, model: Model, reason: str) -> None:
    """Drops a model's weights and KV from host memory."""
    node.host.drop_weights(model.name)
    node.host.drop_kv(model.name)
    cool(node, model, reason)


def load_ended(node: Node, model: Model, copy: Copy, checksums: tuple[int, ...] | None) -> None:
    """Ends a load's use of host memory. checksums: those of the complete copy of the weights that host memory holds, which the load
    has read or written; None: it holds no complete copy, and what it holds of the weights is dropped. Saved KV is dropped, because
    it has been restored or is of no use."""
    host = node.host
    if checksums is None:
        host.end_grant(copy.placement_id)
        host.drop_weights(model.name)
    elif copy.keep_slots:
        host.end_grant(copy.placement_id, copy.keep_slots)
        size_bytes = copy.facts.all_weights_bytes
        host.hold(model.name, KeptWeights(copy.facts.fingerprint, copy.keep_slots, size_bytes, checksums=checksums))
    host.drop_kv(model.name)
    host.returned(model.name)
    if not same_files(copy.facts, model.facts):
        drop_all(node, model, "its files changed")


def copy_ended(node: Node, model: Model, copy: Copy) -> None:
    """Ends all use of host memory by a copy that has left its device: no load or eviction of it reads or writes there any more."""
    node.host.end_grant(copy.placement_id)
    node.host.returned(model.name)
    if model.unload_to == residency.COLD:
        drop_all(node, model, "unloaded by the operator")


# ---- at an eviction


def grants_of_eviction(node: Node, model: Model, copy: Copy) -> Slots:
    """Returns slots of host memory in which to save the KV of a model that is evicted. They hold only a part of the KV if making
    more slots free would require dropping copies that are worth more. () if computing the KV again is faster than copying it, or if
    host memory may not hold KV of this model."""
    host, device = node.host, node.devices[copy.leader]
    per_token = copy.facts.kv_bytes_per_token
    num_bytes = model.kv_bytes
    if not host.num_slots or not copy.facts.saves_kv or not num_bytes or not per_token or model.placement is not None:
        return ()
    if (model.leaves and not model.comes_back) or model.unload_to == residency.COLD:
        return ()
    if device.costs.saved_s_per_token(model.name, per_token) <= 0 or not same_files(copy.facts, model.facts):
        return ()
    wanted = min(host.num_slots, -(-num_bytes // node.settings.chunk_bytes) + 1)
    worth = kv_value(node, model, num_bytes // per_token, num_bytes)
    return host.grant(copy.placement_id, model.name, make_room(node, model, wanted, worth, whole=False))


def saved(node: Node, model: Model, copy: Copy, slots: Slots, index: bytes, num_tokens: int) -> None:
    """Records the KV of num_tokens tokens that an eviction has saved, in place of any KV of the model that was saved earlier. It
    stays until it is restored or dropped. slots: those of the granted slots that hold KV; (): none was saved. index: the engine's
    encoded list of the tokens whose KV the slots hold, by which a later load restores them. Does nothing if the evicted copy was
    still being loaded: KV that was saved earlier then stays."""
    host = node.host
    if copy.ready_at is None:
        return  # the load was withdrawn: what was saved before is still good
    host.drop_kv(model.name)
    host.end_grant(copy.placement_id, slots)
    if not slots:
        return
    num_bytes = len(slots) * node.settings.chunk_bytes
    host.hold(model.name, SavedKV(copy.facts.fingerprint, slots, num_bytes, index=index, num_tokens=num_tokens))
    model.story.tell(node.now, node.cause, f"KV of {num_tokens} tokens saved in host memory")
    if (model.leaves and not model.comes_back) or not same_files(copy.facts, model.facts):
        host.drop_kv(model.name)
