"""Keeps room for pinned models. Each pinned model has a home, the device (or devices, if it is split) on which its room is kept.
All models pinned on a device must fit there together, loaded or not.
"""

from __future__ import annotations

from scheduler.node.actions import Refusal
from scheduler.node.groups import groups, is_group, joined, num_other_hosts, pools
from scheduler.node.ledger import Size, amount
from scheduler.node.node import Device, Model, Node


def fits_beside_pins(model: Model, device: Device) -> bool:
    """Returns whether the model, or a share of it, fits on the device together with all models pinned there, whether these are
    loaded or not."""
    if device.name in model.home:
        return True
    size, pinned = size_kept(model), device.pinned
    work_space = max(size.work_space_chunks, pinned.work_space_chunks)
    return size.chunks + pinned.chunks + work_space <= device.ledger.total_chunks


def has_place(node: Node, model: Model) -> bool:
    """Returns whether there is room beside pinned models for this model on one of its devices, or on as many as it needs if it is
    split. True if it has no devices."""
    roomy = (name for name in model.devices if fits_beside_pins(model, node.devices[name]))
    return not model.devices or bool(pools(roomy, model.facts.num_ranks, model.facts.num_stages))


def pin(node: Node, model: Model) -> Refusal | None:
    """Pins the model: keeps room for it on the devices where it is or is being placed, else on those of its devices where pinned
    models leave the most room. Returns a refusal if there is no room; None if the model is pinned."""
    if model.pinned:
        return None
    home = place_of(model) or most_room(node, model)
    if not home or not all(fits_beside_pins(model, node.devices[name]) for name in home):
        return would_not_fit(node, model)
    model.pinned, model.asked_at = True, node.now
    move_home(node, model, home)
    model.story.tell(node.now, node.cause, f"pinned, with room kept on {joined(home)}")
    return None


def place_of(model: Model) -> tuple[str, ...]:
    """Returns the devices that hold a model or onto which it is being placed; () if there are none, or if its copy has lost one of
    its devices because the engine there died."""
    return () if model.copy is not None and not model.copy.is_whole else model.occupies


def most_room(node: Node, model: Model) -> tuple[str, ...]:
    """Returns the devices on which pinned models leave the most room for a further one, as many as the model needs. Devices of this
    machine come before those of other hosts. () if too few devices have room for it."""
    roomy = [device for name in model.devices if fits_beside_pins(model, device := node.devices[name])]
    roomy.sort(key=lambda device: (num_other_hosts((device.name,)), device.pinned.chunks - device.ledger.total_chunks))
    names = [device.name for device in roomy]
    return next(iter(groups(names, model.facts.num_ranks, model.facts.num_stages)), ())


def unpin(node: Node, model: Model) -> None:
    if model.pinned:
        model.pinned = False
        move_home(node, model, ())
        model.story.tell(node.now, node.cause, "unpinned")


def check_home(node: Node, model: Model) -> None:
    """Checks that a pinned model still fits on its home, the devices that keep room for it, after its size or devices may have
    changed. If it does not, it gets another home or is unpinned. Must be called only for a model without a whole copy; does nothing
    if the model is not pinned."""
    if not model.pinned:
        return
    home = [node.devices[name] for name in model.home]
    for device in home:
        recount(node, device)
    fits = all(device.pinned.chunks + device.pinned.work_space_chunks <= device.ledger.total_chunks for device in home)
    if fits and is_group(model.home, model.facts.num_ranks, model.facts.num_stages) and set(model.home) <= set(model.devices):
        return
    model.pinned = False
    move_home(node, model, ())
    refusal = pin(node, model)
    if refusal is not None:
        model.story.tell(node.now, node.cause, f"pinned no longer: {refusal.message}")


def move_home(node: Node, model: Model, home: tuple[str, ...]) -> None:
    """Replaces the devices that keep room for a pinned model by `home`; (): no device keeps room for it any more. Models that found
    no room on the old or the new devices are marked, so that placing them is tried again."""
    old, model.home = model.home, home
    node.pinned.pop(model.name, None)
    if home:
        node.pinned[model.name] = model
    for name in dict.fromkeys((*old, *home)):
        recount(node, node.devices[name])


def recount(node: Node, device: Device) -> None:
    sizes = [size_kept(model) for model in node.pinned.values() if device.name in model.home]
    device.pinned = Size(
        weights_chunks=sum(size.weights_chunks for size in sizes),
        kv_chunks=sum(size.kv_chunks for size in sizes),
        work_space_chunks=max((size.work_space_chunks for size in sizes), default=0),
    )
    for name in device.crowded_out:
        node.touched[name] = None
    device.crowded_out.clear()
    for placement in device.placements.values():
        node.touched[placement.model] = None
    node.stirred[device.name] = None


def size_kept(model: Model) -> Size:
    return model.copy.size if model.copy else model.size


def would_not_fit(node: Node, model: Model) -> Refusal:
    chunk = node.settings.chunk_bytes
    need = amount((model.size.chunks + model.size.work_space_chunks) * chunk)
    parts = []
    for name in model.devices:
        device = node.devices[name]
        kept, total = amount(device.pinned.chunks * chunk), amount(device.ledger.total_chunks * chunk)
        names = ", ".join(other.name for other in node.pinned.values() if name in other.home)
        parts.append(f"{name} has {total}, of which pinned models ({names or 'none'}) take {kept}")
    num_ranks = model.facts.num_ranks
    split = f" on each of {num_ranks} devices of one kind (parallel)" if model.facts.is_split else ""
    message = f"{model.name} needs {need} with its reserved KV and work space{split}; " + "; ".join(parts)
    return Refusal("would_not_fit", message, details={"model": model.name, "needed_bytes": model.size.chunks * chunk})
