"""Sets a part of a device's memory budget aside for each isolated model (its carve-out), before any model is loaded.

All other code treats a carve-out as a device: it has its own account of memory, its own lease and engine process, and only one
model may live there. It stays for the life of the daemon, even while its model is not loaded. An engine takes its device's memory
once and returns none of it to the driver (docs/design/processes.md), so other models could not use the memory of an isolated model
that was evicted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from config.devices import CUDA_LEFT_BYTES, MIN_CHUNKS
from config.schema import DeviceBudget, ModelConfig, NodeConfig
from config.units import format_bytes, parse_bytes
from daemon.models.registered import Registered
from daemon.models.registry import Registry
from daemon.record.state import NodeState
from loader.models.catalog import Checkpoint
from scheduler.node.ledger import size_of


@dataclass(slots=True, frozen=True)
class Division:
    """The result of `divide`. devices: the node's devices, with their budgets reduced by the carve-outs, followed by the
    carve-outs. problems: isolated model -> why it has no carve-out; such a model is not served."""

    devices: list[DeviceBudget]
    problems: dict[str, str]


def isolated_models(config: NodeConfig) -> dict[str, ModelConfig]:
    """Returns the settings of the models that get a carve-out (the key `isolate`), by the model's name."""
    return {name: settings for name, settings in sorted(config.models.items()) if settings.isolate}


def divide(
    config: NodeConfig, devices: Sequence[DeviceBudget], state: NodeState, checkpoints: Mapping[str, Checkpoint]
) -> Division:
    """Divides the devices' memory budgets between shared use and carve-outs for isolated models. state: what operators have set,
    such as pinned models. checkpoints: the content of the models folder, by name; needed only if a model is isolated."""
    isolated = isolated_models(config)
    if not isolated:
        return Division(list(devices), {})
    undivided = Registry(config, devices, state)
    found = {name: undivided.register(config, checkpoints[name]) for name in isolated if name in checkpoints}
    left = {device.name: device.budget_bytes for device in devices}
    carved: dict[str, list[DeviceBudget]] = {device.name: [] for device in devices}
    problems = {}
    for name, settings in isolated.items():
        try:
            num_bytes = _wanted_bytes(config, name, settings, found.get(name))
            device = _choose(config, name, _allowed(devices, settings, found.get(name)), left, num_bytes)
        except _CannotCarve as error:
            problems[name] = str(error)
            continue
        carved[device.name].append(DeviceBudget(f"{device.name}/{name}", num_bytes, device.uuid, name, device.budget_bytes))
        left[device.name] -= num_bytes + _context_bytes(device)
    divided = []
    for device in devices:
        divided += [msgspec.structs.replace(device, budget_bytes=left[device.name]), *carved[device.name]]
    return Division(divided, problems)


class _CannotCarve(Exception):
    """Raised when no carve-out can be set aside for a model. The message, which names the reason, is shown to the operator
    unchanged."""


def _wanted_bytes(config: NodeConfig, name: str, settings: ModelConfig, found: Registered | None) -> int:
    """Returns the size of a model's carve-out in bytes, in whole chunks: the setting isolate_bytes or, without it, the memory that
    the model needs. found: the model's record, None if its folder is missing. Raises _CannotCarve if neither settings nor files
    determine the size."""
    chunk_bytes = int(config.chunk_bytes)
    if settings.isolate_bytes is not None:
        return -(-parse_bytes(settings.isolate_bytes) // chunk_bytes) * chunk_bytes
    if found is None or found.entry is None:
        why = "they were not there" if found is None else f"they could not be used: {found.problem}"
        raise _CannotCarve(
            f'models."{name}".isolate: what it takes was to be read from its files when hearthd started, and {why}. '
            "Restart hearthd, or set isolate_bytes"
        )
    size = size_of(found.facts, chunk_bytes)
    return (size.chunks + size.work_space_chunks) * chunk_bytes


def _allowed(devices: Sequence[DeviceBudget], settings: ModelConfig, found: Registered | None) -> list[DeviceBudget]:
    """Returns the devices of this machine on which an isolated model may have its carve-out. The model's settings, and the formats
    in its files, may exclude devices."""
    names = found.facts.devices if found is not None and found.entry is not None else tuple(settings.devices)
    return [device for device in devices if not device.host and (not names or device.name in names)]


def _choose(config: NodeConfig, name: str, allowed: Sequence[DeviceBudget], left: dict[str, int], num_bytes: int) -> DeviceBudget:
    """Returns the device for a carve-out: of the allowed devices that would keep at least MIN_CHUNKS chunks besides the carve-out
    and its engine's context (_context_bytes), the one with the most memory left. left: device -> bytes of its budget that are in no
    carve-out yet. num_bytes: the carve-out's size. Raises _CannotCarve if no device has enough."""
    least = MIN_CHUNKS * int(config.chunk_bytes)
    roomy = [device for device in allowed if left[device.name] - num_bytes - _context_bytes(device) >= least]
    if not roomy:
        is_given = config.models.get(name, ModelConfig()).isolate_bytes is not None
        key = "isolate_bytes" if is_given else "max_model_len"
        has = ", ".join(f"{one.name} has {format_bytes(left[one.name])} left" for one in allowed) or "no device may hold it"
        raise _CannotCarve(
            f'models."{name}".isolate: {format_bytes(num_bytes)} cannot be set aside: {has}, of which it keeps '
            f"{format_bytes(least)}. Give the device a larger budget, or the model a smaller {key}"
        )
    return max(roomy, key=lambda device: left[device.name])


def _context_bytes(device: DeviceBudget) -> int:
    """Returns how many bytes of GPU memory one more engine process takes on the device besides its budget, for its CUDA context,
    graphs and modules; 0 for a cpu device."""
    return CUDA_LEFT_BYTES if device.is_local("cuda") else 0
