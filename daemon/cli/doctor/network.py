"""Checks whether the HTTP address is free or which process uses it, and checks the certificate for that address."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Mapping
from typing import Any

from config import units
from daemon.cli.doctor.finding import FAIL, OK, WARN, Finding

SYSTEMD = "systemd"


def certificate(tls: Mapping[str, Any] | None) -> Finding:
    """Returns the finding on the TLS certificate. tls: the certificate's fields as in `hearth status`, or {"problem": why it cannot
    be used}; None: no certificate is set."""
    if tls is None:
        return Finding("TLS", OK, "none is set: listen speaks HTTP")
    if "problem" in tls:
        change = "correct it; if this user may not read what hearthd may, run this as root" if os.geteuid() else "correct it"
        return Finding("TLS", FAIL if not os.geteuid() or "cannot be read" not in tls["problem"] else WARN, tls["problem"], change)
    if tls["warning"]:
        return Finding("TLS", WARN, tls["warning"], "renew it; hearthd takes the new files by itself")
    return Finding("TLS", OK, f"certificate {tls['subject']}, {tls['days_left']} days left")


def port(listen: str, problem: OSError | None, holder: str | None) -> Finding:
    """Returns the finding on the HTTP address `listen`, when no daemon runs. problem: the error of binding to that address; None:
    it is free. holder: the process that listens on it, as `NAME (pid N)`; None: unknown."""
    if problem is None:
        return Finding("HTTP address", OK, f"{listen} is free")
    if problem.errno != errno.EADDRINUSE:
        return Finding("HTTP address", FAIL, f"{listen}: {problem.strerror}", "set listen to an address of this machine")
    if holder is not None and holder.partition(" ")[0] == SYSTEMD:
        return Finding("HTTP address", OK, f"{listen} is held by systemd, as hearthd.socket does")
    if holder is None:
        change = "all is well if it is hearthd.socket (systemctl status hearthd.socket); else set listen, or stop it"
        return Finding("HTTP address", WARN, f"{listen} is taken; only root can see by whom", change)
    return Finding("HTTP address", FAIL, f"{listen} is taken by {holder}", "stop it, or set listen to another port")


def find_port(listen: str) -> Finding:
    host, number = units.parse_listen(listen)
    try:
        infos = socket.getaddrinfo(host, number, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        with socket.socket(infos[0][0], socket.SOCK_STREAM) as one:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            one.bind(infos[0][4])
            one.listen()
    except OSError as error:
        return port(listen, error, _holder(number) if error.errno == errno.EADDRINUSE else None)
    return port(listen, None, None)


def _holder(number: int) -> str | None:
    import psutil

    try:
        for each in psutil.net_connections("tcp"):
            if each.status == psutil.CONN_LISTEN and each.laddr.port == number and each.pid:
                return f"{psutil.Process(each.pid).name()} (pid {each.pid})"
    except psutil.Error:
        return None
    return None
