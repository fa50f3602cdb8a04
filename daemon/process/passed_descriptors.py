"""Takes over the descriptors that systemd passes to the daemon: listening sockets, and descriptors from the FD store
(sd_listen_fds(3))."""

from __future__ import annotations

import contextlib
import os
from collections.abc import MutableMapping

FIRST_FD = 3  # SD_LISTEN_FDS_START
NAMELESS = "unknown"  # what systemd calls a descriptor without a name


def take(environment: MutableMapping[str, str] | None = None) -> dict[str, list[int]]:
    """Returns the descriptors that systemd passed to this process, by name (LISTEN_FDNAMES), and removes LISTEN_* from the
    environment; {} if there are none. Child processes do not inherit the descriptors; otherwise an engine that outlives the daemon
    would keep a port in use."""
    variables = os.environ if environment is None else environment
    pid, count, names_text = (variables.pop(name, "") for name in ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"))
    if pid != str(os.getpid()) or not count.isdigit():
        return {}
    names = names_text.split(":") if names_text else []
    found: dict[str, list[int]] = {}
    for at in range(int(count)):
        fd = FIRST_FD + at
        with contextlib.suppress(OSError):  # an error shows up later, where the descriptor is used
            os.set_inheritable(fd, False)
        found.setdefault(names[at] if at < len(names) else NAMELESS, []).append(fd)
    return found
