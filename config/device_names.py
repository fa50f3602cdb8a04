"""Parses the names of devices: `cpu:0` or `cuda:1`, followed by `@HOST` if another host lends the device, or by `/MODEL` for a
carve-out, the part of a device that is set aside for an isolated model.
"""

from __future__ import annotations

import re

KINDS = ("cpu", "cuda")  # what devices' names begin with
# the form of a host's name; it is the name of a table and a part of devices' names, and never looked up in the network
HOST = re.compile(r"[a-z0-9][a-z0-9-]*\Z")
HOST_FORM = 'the name of a host has small letters, digits and "-", as in "b" or "gpu-2"'


def kind_of(name: str) -> str:
    """Returns the kind of a device by its name: "cpu" or "cuda"."""
    return name.partition(":")[0]


def host_of(name: str) -> str:
    """Returns the host that lends a device: "b" of `cpu:0@b`; "" for a device of this machine."""
    return name.partition("/")[0].partition("@")[2]


def hardware_of(name: str) -> str:
    """Returns the name that a device has on its own machine: `cpu:0` for `cpu:0@b`, which the host b lends, and for `cpu:0/MODEL`,
    the carve-out of an isolated model."""
    return name.partition("/")[0].partition("@")[0]


def is_local(name: str, kind: str) -> bool:
    """Returns whether the name is that of a device of the given kind (cpu or cuda) on this machine. Only such devices use this
    machine's memory, cores or GPUs."""
    return not host_of(name) and kind_of(name) == kind
