"""The node that chaos is done to: a real daemon under a stand-in for systemd, a few models and adapters in memory for some."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from tests import kernel_cache
from tests.chaos.cast import Cast
from tests.chaos.clients import Clients
from tests.chaos.memory import Groups
from tests.chaos.slow_mount import DEVICE, SlowMount
from tests.chaos.versions import Version, all_versions
from tests.daemon.service_manager import NotifySocket
from tests.e2e.node import ROOT
from tests.e2e.service_node import ServiceNode

DEVICES = ("cpu:0=52MiB", "cpu:1=52MiB")
SMALLER_DEVICES = ("cpu:0=48MiB", "cpu:1=44MiB")
STALL_S = 10.0  # the smallest that is allowed
CONFIG = f"""engine_stall_s = {STALL_S}
drain_timeout_s = 5
max_wait_s = 60
"""
TEXT, SCANNING = "daemon.text", "daemon.scanning"  # words of command lines
STATE_DISK_BYTES = 256 << 10


class Means:
    """What of a machine can be taken away here. state_disk: whether the state folder is a disk of its own, which can be filled.
    may_mount: whether a folder can be mounted whose reads are slow. groups: makes control groups of memory; None where none can be
    made. skipped: what cannot be done, in words."""

    def __init__(self, state_disk: bool, may_mount: bool, groups: Groups | None) -> None:
        self.state_disk, self.may_mount, self.groups = state_disk, may_mount, groups
        lacking = {
            "full state disk: a tmpfs can be mounted by root only": not state_disk,
            f"slow mounts: {DEVICE} can be mounted by root only, where it is there": not may_mount,
            "memory is short: no control group of memory can be made here": groups is None,
        }
        self.skipped = [what for what, is_lacking in lacking.items() if is_lacking]


class World:
    """The node, who answers there, its clients, and what acts need. versions: those that can be installed."""

    def __init__(
        self,
        node: ServiceNode,
        cast: Cast,
        clients: Clients,
        draw: random.Random,
        means: Means,
        versions: tuple[Version, ...],
    ) -> None:
        self.node, self.cast, self.clients, self.draw, self.versions = node, cast, clients, draw, versions
        self.config = node.config.read_text()
        self.state_disk, self.may_mount, self.groups = means.state_disk, means.may_mount, means.groups
        self.version = versions[0]
        self._behind: dict[str, threading.Thread] = {}
        self.engines_ended_s = 0.0  # when an act has ended an engine the last time

    @property
    def pid(self) -> int:
        assert self.node.process is not None
        return self.node.process.pid

    def complain(self, what: str) -> None:
        self.clients.faults.append(what)

    def behind(self, kind: str, work: Callable[[], object]) -> None:
        """Does work in a thread while acts go on, after the last of this kind has ended."""
        if (before := self._behind.get(kind)) is not None:
            before.join()
        self._behind[kind] = threading.Thread(target=self._complaining, args=(work,), name=kind, daemon=True)
        self._behind[kind].start()

    def _complaining(self, work: Callable[[], object]) -> None:
        try:
            work()
        except Exception as error:
            self.complain(f"{threading.current_thread().name}: {type(error).__name__}: {error}")

    def join(self) -> None:
        """Waits for what is done in threads."""
        for kind in ("mount", "load", "load of an adapter", "operator", "files"):  # the first begins the next two
            self.join_one(kind)

    def join_one(self, kind: str) -> None:
        if (thread := self._behind.get(kind)) is not None:
            thread.join()

    def cli(self, *args: str, codes: tuple[int, ...] | None = (0,)) -> subprocess.CompletedProcess[str]:
        """Runs a command; another exit code than these is a complaint. None: any is right."""
        done = self.node.cli(*args)
        if codes is not None and done.returncode not in codes:
            self.complain(f"hearth {' '.join(args)}: exit code {done.returncode}: {done.stdout}{done.stderr}")
        return done


@contextlib.contextmanager
def started(folder: Path, runner: str, cast: Cast) -> Iterator[tuple[ServiceNode, Means]]:
    """Yields a node that runs, and what can be taken from it."""
    cast.make(folder / "n")
    config = CONFIG + cast.config
    state = folder / "n" / "state"
    state.mkdir()
    notify = NotifySocket(folder)
    flags = ["--dtype", "float32", "--threads", "1", "--host-tier-bytes", "48MiB"]
    with contextlib.ExitStack() as stack:
        stack.callback(notify.close)
        means = Means(_state_disk(stack, state), _may_mount(folder / "n", folder), _groups())
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        node = ServiceNode(
            folder / "n", notify, devices=DEVICES, runner=runner, config=config, flags=flags, null_step_ms=20.0
        )  # fmt: skip
        node.listeners = [("http", listener)]
        stack.enter_context(node)
        yield node, means


def _state_disk(stack: contextlib.ExitStack, state: Path) -> bool:
    command = ["mount", "-t", "tmpfs", "-o", f"size={STATE_DISK_BYTES}", "tmpfs", str(state)]
    is_mounted = os.getuid() == 0 and not subprocess.run(command, capture_output=True).returncode
    if is_mounted:
        stack.callback(subprocess.run, ["umount", str(state)], check=False)
    return is_mounted


def _may_mount(source: Path, folder: Path) -> bool:
    at = folder / "mount"
    at.mkdir()
    try:
        SlowMount(source, at).close()
    except OSError:
        return False
    return True


def _groups() -> Groups | None:
    try:
        return Groups()
    except OSError:
        return None


def versions_for(folder: Path, runner: str) -> tuple[Version, ...]:
    """Returns the versions that can be installed. Compiled kernels are found by the path of their sources, so those of the copies
    have to be compiled, and are kept at one place for that; without them, torch's operations could give other texts."""
    if runner == "null":
        return all_versions(folder / "versions")
    found = all_versions(ROOT / ".pytest_cache" / "chaos")
    for version in found:
        if version.tree != ROOT:
            kernel_cache.warm_tree(version.tree)
    return found
