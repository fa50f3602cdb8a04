"""Makes listening sockets, with errors that say what to do."""

from __future__ import annotations

import errno
import os
import socket
import stat
from collections.abc import Mapping

from config.paths import MAX_SOCKET_PATH_BYTES
from config.units import parse_listen
from daemon.process import fd_store

BACKLOG = 2048
HTTP, ADMIN, CONTROL, STATUS = "http", "admin", "control", "status"  # FileDescriptorName= in a socket unit


class SocketError(Exception):
    """Raised when the daemon cannot listen. The message names the address and the reason."""


def inherited(passed: Mapping[str, list[int]]) -> dict[str, list[socket.socket]]:
    """Returns the listening sockets that systemd passed, by name (FileDescriptorName=). passed: all passed descriptors by name;
    those that come from the FD store are left out. Raises SocketError for a name or kind of socket that is not supported."""
    found: dict[str, list[socket.socket]] = {}
    for name, fd in ((name, fd) for name, fds in passed.items() for fd in fds):
        if fd_store.is_stored(name):
            continue
        if name not in (HTTP, ADMIN, CONTROL, STATUS):
            raise SocketError(f"LISTEN_FDNAMES: {name!r} is none of {HTTP}, {ADMIN}, {CONTROL}, {STATUS}; set FileDescriptorName=")
        try:
            sock = socket.socket(fileno=fd)
            listening = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        except OSError as error:
            raise SocketError(f"LISTEN_FDS: {name} (descriptor {fd}) cannot be used: {error.strerror}") from None
        families = (socket.AF_UNIX,) if name in (CONTROL, STATUS) else (socket.AF_INET, socket.AF_INET6)
        if not listening or sock.type != socket.SOCK_STREAM or sock.family not in families:
            kind = "Unix stream" if name in (CONTROL, STATUS) else "TCP"
            raise SocketError(f"LISTEN_FDS: {name} (descriptor {fd}) must be a listening {kind} socket, with Accept=no")
        sock.setblocking(False)
        found.setdefault(name, []).append(sock)
    return found


def bind_http(listen: str) -> list[socket.socket]:
    """Returns listening TCP sockets, one for each address of the host; with port 0 only one. listen: HOST:PORT. Raises SocketError
    if one cannot be bound. If the host has several addresses, those that this machine does not have are skipped."""
    host, port = parse_listen(listen)
    try:
        infos = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as error:
        raise SocketError(f"listen {listen}: {host!r} is no address of this machine: {error.strerror}") from None
    bound: list[socket.socket] = []
    for family, kind, protocol, _, address in dict.fromkeys(infos):
        sock = socket.socket(family, kind, protocol)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            sock.bind(address)
            sock.listen(BACKLOG)
            sock.setblocking(False)
        except OSError as error:
            sock.close()
            if error.errno in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL) and len(infos) > 1:
                continue  # a host name may have an address of a family that this machine has switched off
            for other in bound:
                other.close()
            raise SocketError(f"listen {listen}: {_why(error)}") from None
        bound.append(sock)
        if port == 0:
            break
    if not bound:
        raise SocketError(f"listen {listen}: no address of {host!r} can be used on this machine")
    return bound


def keep_alive(listener: socket.socket) -> None:
    """Turns on TCP keep-alive for the connections that the listener accepts, so that vanished clients are noticed after a while."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def url_of(sock: socket.socket, scheme: str = "http") -> str:
    host, port = sock.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = "127.0.0.1" if host == "0.0.0.0" else "::1"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def too_long(path: str) -> str:
    """Returns why no Unix socket can have this path; "" if its length allows one."""
    length = len(os.fsencode(path))
    if length <= MAX_SOCKET_PATH_BYTES:
        return ""
    return f"{length} bytes is too long for a socket path, at most {MAX_SOCKET_PATH_BYTES}"


def bind_control(path: str, mode: int = 0o660) -> socket.socket:
    """Returns a new listening Unix socket, which has `mode` from the beginning. A socket file that nobody listens on is replaced.
    Raises SocketError if another process listens there or the path cannot be used."""
    if told := too_long(path):
        raise SocketError(f"control {path}: {told}")
    _make_folder(os.path.dirname(os.path.abspath(path)), path)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    mask = os.umask(0o777 & ~mode)
    try:
        if os.path.lexists(path):
            _remove_stale(path)
        sock.bind(path)
        sock.listen(64)
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        raise SocketError(f"control {path}: {_why(error)}") from None
    except SocketError:
        sock.close()
        raise
    finally:
        os.umask(mask)
    return sock


def _make_folder(folder: str, path: str) -> None:
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        owner = os.stat(folder).st_uid
    except OSError as error:
        raise SocketError(f"control {path}: folder {folder}: {error.strerror}") from None
    # another user can predict the name of the fallback folder below /tmp
    if folder.startswith("/tmp/hearthd-") and owner != os.getuid():
        raise SocketError(f"control {path}: folder {folder} belongs to another user (uid {owner}); name a socket with --control")


def _remove_stale(path: str) -> None:
    if not stat.S_ISSOCK(os.lstat(path).st_mode):
        raise SocketError(f"control {path}: something is there that is no socket; it is left alone")
    probe = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        probe.settimeout(1.0)
        probe.connect(path)
    except ConnectionRefusedError:
        os.unlink(path)
    except OSError as error:
        raise SocketError(f"control {path}: cannot tell whether somebody listens there: {error.strerror or error}") from None
    else:
        raise SocketError(f"control {path}: another hearthd is running there; stop it or name another socket with --control")
    finally:
        probe.close()


def _why(error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return "the port is in use by another program; choose another one with --listen (port 0 picks a free one)"
    if error.errno == errno.EACCES:
        return "permission denied"
    return error.strerror or str(error)
