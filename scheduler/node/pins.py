"""Room kept for pinned models. Each has a home device; all models pinned there must fit together, loaded or not."""

from __future__ import annotations

from scheduler.node.actions import Refusal
from scheduler.node.ledger import Size, amount
from scheduler.node.node import Device, Model, Node


def fits_beside_pins(model: Model, device: Device) -> bool:
    """Returns whether the model could be on the device together with all that is pinned there."""
    if model.home == device.name:
        return True
    size, pinned = size_kept(model), device.pinned
    work_space = max(size.work_space_chunks, pinned.work_space_chunks)
    return size.chunks + pinned.chunks + work_space <= device.ledger.total_chunks


def has_place(node: Node, model: Model) -> bool:
    """Returns whether the pins leave the model room on one of its devices."""
    return not model.devices or any(fits_beside_pins(model, node.devices[name]) for name in model.devices)


def pin(node: Node, model: Model) -> Refusal | None:
    """Keeps room for the model on one of its devices (preferably where it is or is going to), or returns why there is none."""
    if model.pinned:
        return None
    where = model.copy or model.placement
    names = (where.device,) if where else model.devices
    homes = [node.devices[name] for name in names if fits_beside_pins(model, node.devices[name])]
    if not homes:
        return would_not_fit(node, model)
    model.pinned, model.asked_at = True, node.now
    move_home(node, model, max(homes, key=lambda device: device.ledger.total_chunks - device.pinned.chunks).name)
    model.story.tell(node.now, node.cause, f"pinned, with room kept on {model.home}")
    return None


def unpin(node: Node, model: Model) -> None:
    if model.pinned:
        model.pinned = False
        move_home(node, model, "")
        model.story.tell(node.now, node.cause, "unpinned")


def check_home(node: Node, model: Model) -> None:
    """Checks the home of a model without a copy whose needs may have changed: it keeps its home, gets another, or is unpinned."""
    if not model.pinned:
        return
    home = node.devices[model.home]
    recount(node, home)
    if home.name in model.devices and home.pinned.chunks + home.pinned.work_space_chunks <= home.ledger.total_chunks:
        return
    model.pinned = False
    move_home(node, model, "")
    refusal = pin(node, model)
    if refusal is not None:
        model.story.tell(node.now, node.cause, f"pinned no longer: {refusal.message}")


def move_home(node: Node, model: Model, home: str) -> None:
    """Moves the room kept for a model. Models that pins kept off the old home are considered again."""
    old, model.home = model.home, home
    node.pinned.pop(model.name, None)
    if home:
        node.pinned[model.name] = model
    for name in {old, home} - {""}:
        recount(node, node.devices[name])


def recount(node: Node, device: Device) -> None:
    sizes = [size_kept(model) for model in node.pinned.values() if model.home == device.name]
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
        names = ", ".join(other.name for other in node.pinned.values() if other.home == name)
        parts.append(f"{name} has {total}, of which pinned models ({names or 'none'}) take {kept}")
    message = f"{model.name} needs {need} with its reserved KV and work space; " + "; ".join(parts)
    return Refusal("would_not_fit", message, details={"model": model.name, "needed_bytes": model.size.chunks * chunk})
