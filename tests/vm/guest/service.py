"""The service as an administrator handles it: systemctl, journalctl, its settings, drop-ins, and how it is brought back."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from tests.clone import ROOT

UNIT, SOCKET = "hearthd.service", "hearthd.socket"
SETTINGS = Path("/etc/hearthd/conf.d")
UNITS = Path("/etc/systemd/system")
# Everything is emulated here: what takes a second on a machine may take twenty
SAFETY_S = 180.0
BASE = """
runner = "null"
null_step_ms = 2
device = ["cpu=64MiB"]
host_tier_bytes = "32MiB"
"""
T = TypeVar("T")
BASE_FILE = "10-vm.toml"
_untouched: list[int] = []  # the main process that as_installed started last


def page(name: str) -> str:
    """The text of a page of docs/."""
    return (ROOT / "docs" / name).read_text()


def run(
    *argv: str, code: int | None = 0, user: str = "", limit_s: float = SAFETY_S, **more: Any
) -> subprocess.CompletedProcess[str]:
    """Runs a command, as a user if one is named. Raises AssertionError if it does not end with this code (None: any)."""
    command = ["runuser", "-u", user, "--", *argv] if user else list(argv)
    done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False, **more)
    if code is not None and done.returncode != code:
        raise AssertionError(f"{' '.join(argv)} ended with {done.returncode}: {done.stdout[-400:]} {done.stderr[-400:]}")
    return done


def shell(line: str, code: int | None = 0) -> subprocess.CompletedProcess[str]:
    """Runs a line of the docs as it stands there."""
    return run(
        "sh",
        "-ec",
        line,
        code=code,
        limit_s=10 * SAFETY_S,
        env={**os.environ, "PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"},
    )


def systemctl(*args: str, code: int | None = 0) -> subprocess.CompletedProcess[str]:
    return run("systemctl", *args, code=code)


def hearth(*args: str, user: str = "", code: int | None = 0) -> Any:
    """The JSON that `hearth ARGS --json` prints."""
    done = run("hearth", *args, "--json", user=user, code=code)
    return json.loads(done.stdout) if done.stdout.strip() else None


def ask(path: str) -> Any:
    """What the status socket answers: `status`, `models`, `config`. As the program hearth does it, whose start takes seconds here.
    Raises OSError."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as opened:
        opened.settimeout(SAFETY_S)
        opened.connect("/run/hearthd/status.sock")
        opened.sendall(f"GET /control/v1/{path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        answer = http.client.HTTPResponse(opened)
        answer.begin()
        return json.loads(answer.read())


def model_state(name: str) -> str:
    return str(next(one["state"] for one in ask("models") if one["name"] == name))


def show(name: str, unit: str = UNIT) -> str:
    return systemctl("show", "--value", "-p", name, unit).stdout.strip()


def main_pid() -> int:
    return int(show("MainPID"))


def pids() -> list[int]:
    """All processes of the service's control group."""
    path = Path("/sys/fs/cgroup/system.slice") / UNIT / "cgroup.procs"
    return [int(word) for word in path.read_text().split()] if path.exists() else []


def command_line(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    return ""


def engine_pid() -> int:
    """The engine's process, of the one device; 0 while there is none. Its command line is that of the process it is a fork of."""
    (device,) = ask("status")["devices"]
    return int(device["pid"])


def is_there(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def wait_for(what: str, found: Callable[[], T], limit_s: float = SAFETY_S) -> T:
    """Returns the first true value. Raises AssertionError when there was none in time."""
    end = time.monotonic() + limit_s
    while True:
        with contextlib.suppress(OSError, ValueError, KeyError):
            if value := found():
                return value
        if time.monotonic() > end:
            raise AssertionError(f"not in {limit_s:g} s: {what}")
        time.sleep(0.2)


def wait_active(after_pid: int = 0) -> int:
    """Waits until the service is active, with another main process than after_pid, and its engine is up. Returns the pid."""

    def active_pid() -> int:
        shown = dict(line.split("=", 1) for line in systemctl("show", "-p", "ActiveState,MainPID", UNIT).stdout.splitlines())
        return int(shown["MainPID"]) if shown["ActiveState"] == "active" and int(shown["MainPID"]) != after_pid else 0

    active = wait_for(f"{UNIT} is active", active_pid)
    wait_for("the engine is up", lambda: all(one["up"] for one in ask("status")["devices"]))
    return active


def journal(since_cursor: str) -> list[dict[str, Any]]:
    """Entries about the unit after a cursor, its own and systemd's. journalctl -u is not asked: where the cursor's entry is another
    unit's, systemd 252 leaves out the first one that is found."""
    run("journalctl", "--sync")
    text = run("journalctl", "-o", "json", "--no-pager", f"--after-cursor={since_cursor}").stdout
    return [entry for entry in map(json.loads, text.splitlines()) if UNIT in (entry.get("_SYSTEMD_UNIT"), entry.get("UNIT"))]


def journal_end() -> str:
    run("journalctl", "--sync")
    text = run("journalctl", "-n", "1", "-o", "json", "--no-pager").stdout
    return str(json.loads(text)["__CURSOR"])


def told_since(cursor: str) -> str:
    """The messages of the unit since then, those of systemd about it with them."""
    return "\n".join(str(one.get("MESSAGE")) for one in journal(cursor))


def write_settings(text: str, name: str = "90-check.toml") -> None:
    (SETTINGS / name).write_text(text)


def write_drop_in(text: str, unit: str = UNIT, name: str = "override.conf") -> None:
    """What `systemctl edit UNIT` does. Raises AssertionError where systemd has something to say about the text."""
    folder = UNITS / f"{unit}.d"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)
    cursor = journal_end()
    systemctl("daemon-reload")
    run("journalctl", "--sync")
    entries = run("journalctl", "-o", "cat", "--no-pager", f"--after-cursor={cursor}").stdout
    complaints = [line for line in entries.splitlines() if str(folder) in line]
    if complaints:
        raise AssertionError(f"systemd says of the drop-in: {'; '.join(complaints)}")


def as_installed(start: bool = True) -> None:
    """Takes away what checks have set, and starts the service anew where it does not run as it was installed and started here.
    start=False: that is left to the check, which restarts it with settings of its own at once."""
    own = [*UNITS.glob("hearthd*.d"), *UNITS.glob("hearthd-*.socket"), *Path("/etc/hearthd").glob("tls")]
    own += [path for path in SETTINGS.glob("*.toml") if path.name != BASE_FILE]
    is_whole = not own and (SETTINGS / BASE_FILE).exists() and not show("DropInPaths") and show("NRestarts") == "0"
    if is_whole and _untouched and _untouched == [main_pid()]:
        return
    same_sockets = not any("socket" in path.name for path in own) and show("ActiveState", SOCKET) == "active"
    for path in own:
        if path.suffix == ".socket":
            systemctl("stop", path.name)
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    (SETTINGS / BASE_FILE).write_text(BASE)
    systemctl("revert", UNIT, SOCKET)  # properties set at run time
    systemctl("daemon-reload")
    systemctl("reset-failed", UNIT, SOCKET, code=None)
    if same_sockets and not start:
        return
    systemctl("stop", UNIT, SOCKET)
    systemctl("start", SOCKET, code=None)
    if start:
        systemctl("start", UNIT, code=None)  # on a very busy machine the first start may fail; systemd tries again
        _untouched[:] = [wait_active()]
