"""Determines the size of the host tier: host memory for weights and KV that are not on their device."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from config import units
from config.load import ConfigError, located_setting
from config.schema import DeviceBudget, NodeConfig

DEFAULT_PERCENT = 50


def resolved(config: NodeConfig, devices: Sequence[DeviceBudget], memory_bytes: int, source: str = "flags") -> NodeConfig:
    """Returns the settings with the size of the host tier (`host_tier_bytes`) as a number of bytes, rounded down to whole chunks.
    devices: the node's devices; those of other hosts are ignored. memory_bytes: the machine's memory. source: where the settings
    come from, for the error.

    The default is half of the machine's memory. It is 0 if all devices are cpu devices, because the weights are in the machine's
    memory anyway. Raises ConfigError if a configured size and the cpu devices' budgets together exceed the machine's memory."""
    value, chunk_bytes = config.host_tier_bytes, units.parse_bytes(config.chunk_bytes)
    own = [device for device in devices if not device.host]
    in_memory = [device for device in own if device.kind == "cpu"]
    if value is None:
        num_bytes = 0 if len(in_memory) == len(own) else memory_bytes * DEFAULT_PERCENT // 100
    else:
        num_bytes = units.parse_size_or_share(value, memory_bytes)
    total = num_bytes + sum(device.budget_bytes for device in in_memory)
    if value is not None and num_bytes and total > memory_bytes:
        raise located_setting(
            ConfigError(
                source,
                "host_tier_bytes",
                f"{value!r}: with the cpu devices' budgets that is {units.format_bytes(total)}, the machine has "
                f"{units.format_bytes(memory_bytes)}",
            )
        )
    return msgspec.structs.replace(config, host_tier_bytes=num_bytes // chunk_bytes * chunk_bytes)
