"""Checks the other hosts that lend devices to this node (`hosts` in the settings): a running daemon reports on their devices;
without a daemon, each host is connected to.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from config import credentials, units
from config.load import ConfigError
from daemon.cli.doctor.finding import FAIL, OK, WARN, Finding

CHANGE = "see that `hearth lend` runs there with the same key, and that the address is reachable; docs/hosts.md"


def told(device: Mapping[str, Any]) -> Finding:
    """Returns the finding on a device that another host lends, as the running daemon reports it. device: its row in `hearth
    status`."""
    name = device["name"]
    if device["up"]:
        return Finding("other host", OK, f"{name}: its engine is up")
    return Finding("other host", WARN, f"{name}: {device['problem'] or 'its engine is starting'}", CHANGE)


def find(name: str, address: str, key_file: str) -> Finding:
    """Connects to a host as the daemon would, without borrowing a device, and returns the finding. name: the host's name in the
    settings. address: its HOST:PORT. key_file: the path of the key that both hosts share."""
    from engine.remote.frames import ToProxy  # imported here, because most nodes have no other hosts
    from engine.remote.wire import WireClosed, connect, read_key

    try:
        key = read_key(credentials.path_of(key_file, f"hosts.{name}.key_file"))
    except (ValueError, ConfigError) as error:
        return Finding("other host", WARN, f"{name}: {error}", "run this as the user of the service if only that may read it")
    try:
        connect(*units.parse_listen(address), key, ToProxy).close()
    except WireClosed as error:
        return Finding("other host", FAIL, f"{name} at {address}: {error}", CHANGE)
    return Finding("other host", OK, f"{name} at {address} answers and has the same key")
