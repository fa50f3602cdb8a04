"""Opens the HTTP listeners. Addresses that other machines can reach require keys, unless the operator allows everybody
(--insecure)."""

from __future__ import annotations

import ipaddress
import logging
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from config.load import ConfigError, located_setting
from config.schema import NodeConfig
from config.units import parse_listen
from daemon.http import sockets

log = logging.getLogger("hearthd")


@dataclass(slots=True)
class Listeners:
    """The listening HTTP sockets. main: for the API. admin: for metrics and health; empty if the main sockets serve these, too."""

    main: list[socket.socket]
    admin: list[socket.socket]

    @property
    def admin_asks_key(self) -> bool:
        """Returns whether requests to the admin sockets need a key: yes if other machines can reach one of their addresses."""
        return _first_open(_addresses(self.admin)) is not None

    def close(self) -> None:
        for sock in (*self.main, *self.admin):
            sock.close()


def bind(config: NodeConfig, passed: Mapping[str, Sequence[socket.socket]], has_keys: bool) -> Listeners:
    """Returns the sockets that systemd passed, or else new ones at the configured addresses. passed: sockets by their
    FileDescriptorName=. has_keys: whether API keys are set. Raises SocketError if an address cannot be used, or if other machines
    can reach it although neither keys nor `insecure` are set."""
    found = Listeners(list(passed.get(sockets.HTTP, ())), list(passed.get(sockets.ADMIN, ())))
    try:
        if not found.main:
            found.main = sockets.bind_http(config.listen)
        elif config.listen != NodeConfig().listen:
            log.warning(
                "listen = %s is not used: systemd passed %s; change ListenStream= with `systemctl edit hearthd.socket`",
                config.listen,
                ", ".join(sockets.url_of(sock) for sock in found.main),
            )
        if not found.admin and config.admin_listen:
            found.admin = sockets.bind_http(config.admin_listen)
        for name, listening in (("listen", found.main), ("admin_listen", found.admin)):
            text = problem(_addresses(listening), has_keys or config.insecure)
            if text is not None:
                raise sockets.SocketError(f"{name}: {text}")
            for sock in listening:
                sockets.keep_alive(sock)
    except sockets.SocketError:
        found.close()
        raise
    return found


def check(config: NodeConfig, has_keys: bool, source: str) -> None:
    """Raises ConfigError if a configured address can be reached from other machines although neither keys nor `insecure` are set.
    It is called before any address is bound. source: the settings file, for errors."""
    for key, listen in (("listen", config.listen), ("admin_listen", config.admin_listen)):
        text = problem(_resolved(listen), has_keys or config.insecure) if listen else None
        if text is not None:
            raise located_setting(ConfigError(source, key, f"{listen!r}: {text}"))


def check_control(config: NodeConfig, source: str) -> None:
    """Raises ConfigError if the path of the control socket or of the status socket is too long for a Unix socket. source: the
    settings file, for errors."""
    for key, path in (("control", config.control), ("status_socket", config.status_socket)):
        if told := sockets.too_long(path):
            raise located_setting(ConfigError(source, key, f"{path!r}: {told}"))


def problem(addresses: Iterable[str], allowed: bool) -> str | None:
    found = None if allowed else _first_open(addresses)
    if found is None:
        return None
    return (
        f"{found} can be reached from other machines and no keys are set, so anybody could use the models. "
        "Say who may with --keys-file FILE, or --insecure if anybody should"
    )


def _first_open(addresses: Iterable[str]) -> str | None:
    """Returns the first address that other machines can reach, or None."""
    return next((address for address in addresses if not _is_local(address)), None)


def _is_local(address: str) -> bool:
    parsed = ipaddress.ip_address(address.partition("%")[0])
    mapped = parsed.ipv4_mapped if isinstance(parsed, ipaddress.IPv6Address) else None
    return (mapped or parsed).is_loopback


def _addresses(listening: Iterable[socket.socket]) -> list[str]:
    return [str(sock.getsockname()[0]) for sock in listening]


def _resolved(listen: str) -> list[str]:
    """Returns the IP addresses of the host in `listen`, which is HOST:PORT; [] if the host's name cannot be resolved. Binding to it
    reports that error later."""
    host, port = parse_listen(listen)
    try:
        infos = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError:
        return []
    return [str(info[4][0]) for info in infos]
