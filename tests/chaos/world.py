"""The node that chaos is done to: a real daemon under a stand-in for systemd, three models in memory for one, and what it holds."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from tests.chaos.clients import Clients
from tests.daemon.service_manager import NotifySocket
from tests.e2e import processes
from tests.e2e.checkpoints import make_model
from tests.e2e.service_node import ServiceNode

MODELS = ("ash", "oak", "elm")
SPARE = "yew"  # a model that no client asks for
STALL_S = 10.0  # the smallest that is allowed
CONFIG = f"""engine_stall_s = {STALL_S}
drain_timeout_s = 5
max_wait_s = 60
"""
TEXT, SCANNING = "daemon.text", "daemon.scanning"  # words of command lines
STATE_DISK_BYTES = 256 << 10
STATISTICS_S = 5.0  # KV that an engine uses is known from its last statistics, which follow an unload
DESCRIPTORS_SLACK = 8  # processes for texts and for scans come and go, as connections do


class World:
    """The node, its clients, and what acts need. state_disk: whether the state folder is a disk of its own, which can be filled."""

    def __init__(self, node: ServiceNode, clients: Clients, draw: random.Random, state_disk: bool) -> None:
        self.node, self.clients, self.draw, self.state_disk = node, clients, draw, state_disk
        self.engines_ended_s = 0.0  # when an act has ended an engine the last time

    @property
    def pid(self) -> int:
        assert self.node.process is not None
        return self.node.process.pid

    def complain(self, what: str) -> None:
        self.clients.faults.append(what)

    def cli(self, *args: str, codes: tuple[int, ...] = (0,)) -> subprocess.CompletedProcess[str]:
        """Runs a command; another exit code than these is a complaint."""
        done = self.node.cli(*args)
        if done.returncode not in codes:
            self.complain(f"hearth {' '.join(args)}: exit code {done.returncode}: {done.stdout}{done.stderr}")
        return done


@contextlib.contextmanager
def started(folder: Path, runner: str) -> Iterator[tuple[ServiceNode, bool]]:
    """Yields a node that runs, and whether its state folder is a disk of its own."""
    for at, name in enumerate((*MODELS, SPARE)):
        make_model(folder / "n" / "models" / name, seed=at, weights_bytes=4 << 20)
    state = folder / "n" / "state"
    state.mkdir()
    state_disk = os.getuid() == 0 and not subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={STATE_DISK_BYTES}", "tmpfs", str(state)], capture_output=True
    ).returncode  # fmt: skip
    notify = NotifySocket(folder)
    flags = ["--dtype", "float32", "--threads", "1", "--host-tier-bytes", "48MiB"]
    try:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            node = ServiceNode(
                folder / "n", notify, devices=["cpu:0=44MiB", "cpu:1=44MiB"], runner=runner, config=CONFIG, flags=flags,
                null_step_ms=20.0,
            )  # fmt: skip
            node.listeners = [("http", listener)]
            try:
                with node:
                    yield node, state_disk
            finally:
                notify.close()
    finally:
        if state_disk:
            subprocess.run(["umount", str(state)], check=False)


def _chunks_in_use(node: ServiceNode) -> float:
    chunks = [line.rpartition(" ") for line in node.get("/metrics")[1].splitlines() if line.startswith("hearth_device_chunks{")]
    return sum(float(value) for name, _, value in chunks if 'state="weights"' in name or 'state="kv"' in name)


def holdings(node: ServiceNode) -> dict[str, Any]:
    """Unloads all models and returns what the node then holds: its processes by kind, the daemon's descriptors, mappings and
    resident bytes, memory of devices and of the host tier that is not free, and requests."""
    for name in (*MODELS, SPARE):
        node.cli("unload", name, "--to", "cold")
    end_s = time.monotonic() + STATISTICS_S
    while _chunks_in_use(node) and time.monotonic() < end_s:
        time.sleep(0.05)
    status = node.json("status")
    daemon = psutil.Process(status["pid"])
    tier = status["host_tier"]
    return {
        "engines": sum(device["pid"] > 0 for device in status["devices"]),
        "zombies": sum(child.status() == psutil.STATUS_ZOMBIE for child in daemon.children(recursive=True)),
        "text_helpers": len(processes.with_word(status["pid"], TEXT)),
        "descriptors": daemon.num_fds(),
        "mappings": len(daemon.memory_maps(grouped=False)),
        "rss_mib": round(daemon.memory_info().rss / 2**20, 1),
        "chunks_in_use": _chunks_in_use(node),
        "host_tier_bytes": tier["bytes"] - tier["free_bytes"],
        "requests": status["requests"],
    }
