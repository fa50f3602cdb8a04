"""Where sockets and state live when nothing names them. Imports nothing heavy: the command line tool starts with it."""

from __future__ import annotations

import os

SERVICE_CONTROL = "/run/hearthd/control.sock"
SERVICE_STATUS = "/run/hearthd/status.sock"
SERVICE_CONFIG = "/etc/hearthd/node.toml"
# sun_path of sockaddr_un holds 108 bytes with the closing zero
MAX_SOCKET_PATH_BYTES = 107


def daemon_control_path() -> str:
    """Where a daemon without `control` puts its socket: the service's folder when it may write there, else the user's."""
    service = os.path.dirname(SERVICE_CONTROL)
    if os.path.isdir(service) and os.access(service, os.W_OK):
        return SERVICE_CONTROL
    return user_control_path()


def daemon_status_path(control: str) -> str:
    """Where a daemon without `status_socket` puts its socket for everybody: beside the service's control socket, else nowhere."""
    return SERVICE_STATUS if control == SERVICE_CONTROL else ""


def client_control_path() -> str:
    """Where `hearth` without `--control` looks: the service's socket if there is one, else the user's."""
    return SERVICE_CONTROL if os.path.exists(SERVICE_CONTROL) else user_control_path()


def user_control_path() -> str:
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    return f"{runtime}/hearthd/control.sock" if runtime else f"/tmp/hearthd-{os.getuid()}/control.sock"


def state_dir() -> str:
    """systemd names the folder of StateDirectory=; several are separated by colons, ours comes first."""
    service = os.environ.get("STATE_DIRECTORY", "").split(":")[0]
    return service or os.path.join(os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state"), "hearthd")


def cache_dir() -> str:
    service = os.environ.get("CACHE_DIRECTORY", "").split(":")[0]
    return service or os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "hearthd")
