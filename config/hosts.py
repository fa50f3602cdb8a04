"""Checks the settings of other hosts that lend devices to this one: the tables `[hosts.NAME]`, and the entries of `device` that
name a device of such a host (`cpu:0@NAME`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from config import units
from config.device_names import HOST, HOST_FORM, host_of


def check_name(name: str) -> None:
    """Checks the name of a host, as in its table `[hosts.NAME]`: small letters, digits and "-", the first not a "-". Raises
    ValueError for any other name."""
    if HOST.match(name) is None:
        raise ValueError(f"is no name of a host: {HOST_FORM}")


def check_address(value: str) -> None:
    """Checks an address at which another host is to be reached: HOST:PORT or [IPv6]:PORT with a host and a port from 1 to 65535.
    Raises ValueError for any other text."""
    host, port = units.parse_listen(value)
    if not host or not port:
        raise ValueError('must be HOST:PORT with a host and a port above 0, as in "10.0.0.2:7100"')


def problem(entries: Sequence[str], hosts: Collection[str]) -> tuple[str, str]:
    """Compares the setting `device` with the tables `[hosts.NAME]`. Returns (key, message) for the first fault found, where key
    is the setting at fault; ("", "") if there is none. entries: the valid entries of `device`. hosts: the names of the tables."""
    named = {entry: host_of(units.parse_device(entry)[0]) for entry in entries}
    for entry, host in named.items():
        if host and host not in hosts:
            return "device", f"{entry!r}: there is no table [hosts.{host}] with the address and the key_file of that host"
    for host in hosts:
        if host not in named.values():
            return f"hosts.{host}", f'no device of this host is named; name one in device, as in "cpu:0@{host}=8GiB"'
    if named and all(named.values()):
        shown = ", ".join(entries)
        return "device", f"{shown}: a device of this machine is needed, too, because the last stage of every model is on one"
    return "", ""
