"""Computes the default paths of sockets, state and caches. It imports nothing slow, because the command line tool imports it at its
start.
"""

from __future__ import annotations

import os

SERVICE_CONTROL = "/run/hearthd/control.sock"
SERVICE_STATUS = "/run/hearthd/status.sock"
SERVICE_CONFIG = "/etc/hearthd/node.toml"
# sun_path of sockaddr_un holds 108 bytes, including the zero at the end
MAX_SOCKET_PATH_BYTES = 107


def daemon_control_path() -> str:
    """Returns the path at which a daemon without a `control` setting creates its control socket: in the service's folder if it may
    write there, else in the user's folder."""
    service = os.path.dirname(SERVICE_CONTROL)
    if os.path.isdir(service) and os.access(service, os.W_OK):
        return SERVICE_CONTROL
    return user_control_path()


def daemon_status_path(control: str) -> str:
    """Returns the path at which a daemon without a `status_socket` setting creates its status socket, which every user may read:
    next to the service's control socket. Returns "" (no status socket) for a daemon with another control socket."""
    return SERVICE_STATUS if control == SERVICE_CONTROL else ""


def client_control_path() -> str:
    """Returns the path of the control socket that `hearth` uses without `--control`: the service's if that exists, else the
    user's."""
    return SERVICE_CONTROL if os.path.exists(SERVICE_CONTROL) else user_control_path()


def user_control_path() -> str:
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    return f"{runtime}/hearthd/control.sock" if runtime else f"/tmp/hearthd-{os.getuid()}/control.sock"


def state_dir() -> str:
    """Returns the default folder for state: under systemd the first folder that the variable STATE_DIRECTORY lists, otherwise a
    folder below the user's home."""
    service = os.environ.get("STATE_DIRECTORY", "").split(":")[0]
    return service or os.path.join(os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state"), "hearthd")


def cache_dir() -> str:
    service = os.environ.get("CACHE_DIRECTORY", "").split(":")[0]
    return service or os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "hearthd")
