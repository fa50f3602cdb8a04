"""What a node holds while it has nothing to do: the memory, descriptors, mappings and processes of its daemon and engines, and what
of its devices is in use. Two measurements tell whether something has leaked."""

from __future__ import annotations

import re
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import psutil

from tests.chaos.cast import FILLERS, SPARE
from tests.chaos.world import SCANNING, TEXT
from tests.e2e.processes import anonymous_bytes
from tests.e2e.service_node import ServiceNode

STATISTICS_S = 5.0  # KV that an engine uses is known from its last statistics, which follow an unload
COLLECTED_S = 1.5  # an engine that is idle for a second collects what evicted models have left, mappings of groups among it
IDLE_S = 30.0  # an engine that has ended is up again by then, and a compiler has ended
MOST_STORED = 16  # descriptors in the service manager's store: FileDescriptorStoreMax= of the unit
MOST_TEXT = 1 + 6  # the text helper; workers for models, for bodies and for grammars
MOST_SCANS = 1  # it ends some seconds after the last scan

CHUNKS = re.compile(r'hearth_device_chunks\{device="(?P<device>[^"]+)",state="(?P<state>\w+)"\} (?P<chunks>\S+)')
NONE_OF = ("zombies", "other_processes", "chunks_in_use", "adapters_in_memory", "host_tier_bytes", "requests")
MOST_FORK_SERVERS = 1  # none if it was killed and no engine was started since
SAME = ("engines", "devices_filled")
# How much more than before of each may be held: what differs from run to run without a leak. Processes for texts and connections
# come and go; mappings and memory follow what was computed last.
MORE = {
    "daemon": {"descriptors": 8, "mappings": 64, "threads": 8, "anonymous_mib": 32.0},
    "engine": {"descriptors": 4, "mappings": 64, "threads": 4, "anonymous_mib": 48.0},
}


def unexplained(node: ServiceNode) -> list[str]:
    """Waits until the node has nothing to do and returns which chunks of its devices hold neither adapters nor prefixes, in
    words."""
    end_s = time.monotonic() + STATISTICS_S
    while (found := _unexplained(node)) and time.monotonic() < end_s:
        time.sleep(0.05)
    return found


def _unexplained(node: ServiceNode) -> list[str]:
    in_use, total = _chunks(node, "kv"), _chunks(node)
    top = node.json("top")
    of_adapters, of_prefixes = defaultdict[str, int](int), defaultdict[str, int](int)
    found = [f"{row['name']} has {row['kv_bytes']} bytes of KV and nothing to do" for row in top["models"] if row["kv_bytes"]]
    for row in top["models"]:
        of_adapters[(row["devices"] or [""])[0]] += sum(row.get("adapters", {}).values())  # split models have none
        for device in row["devices"]:
            of_prefixes[device] += row["kv_cached_bytes"] // len(row["devices"])
    for device in top["devices"]:
        name = device["name"]
        chunk_bytes = device["budget_bytes"] / total[name]
        others = in_use[name] - of_adapters[name] / chunk_bytes
        if others < of_prefixes[name] / chunk_bytes or (others and not of_prefixes[name]):
            what = f"{of_adapters[name]} bytes of adapters and {of_prefixes[name]} of prefixes"
            found.append(f"{name}: {in_use[name]:g} chunks of {chunk_bytes:g} bytes are in use for {what}")
    return found


def holdings(node: ServiceNode, models: Sequence[str]) -> dict[str, Any]:
    """Unloads all models, has each device filled by one, unloads that, and returns what the node then holds."""
    for name in (*models, SPARE):
        node.cli("unload", name, "--to", "cold")
    loaded = [node.cli("load", name).returncode == 0 for name in FILLERS]
    devices = {row["device"] for row in node.json("models") if row["name"] in FILLERS and row["device"]}
    for name in FILLERS:
        node.cli("unload", name, "--to", "cold")
    end_s = time.monotonic() + STATISTICS_S
    while _chunks_in_use(node) and time.monotonic() < end_s:
        time.sleep(0.05)
    assert node.process is not None
    daemon = psutil.Process(node.process.pid)
    end_s = time.monotonic() + IDLE_S
    while ((kinds := _kinds(daemon))["other_processes"] or len(_engines(node)) < len(node.devices)) and time.monotonic() < end_s:
        time.sleep(0.2)
    time.sleep(COLLECTED_S)
    assert node.notify is not None
    node.notify.read()
    status = node.json("status")
    pids = _engines(node)
    tier = status["host_tier"]
    return {
        "daemon": _of(daemon),
        **{f"engine {name}": _of(psutil.Process(pid)) for name, pid in pids.items()},
        "engines": len(pids),
        **{kind: kinds[kind] for kind in ("fork_servers", "text_processes", "scans", "other_processes", "zombies")},
        "stored": len(node.notify.stored),
        "devices_filled": len(devices) if all(loaded) else 0,
        "chunks_in_use": _chunks_in_use(node),
        "adapters_in_memory": sum(len(row.get("adapters", {})) for row in node.json("top")["models"]),
        "host_tier_bytes": tier["bytes"] - tier["free_bytes"],
        "requests": status["requests"],
    }


def _engines(node: ServiceNode) -> dict[str, int]:
    """Returns the process of each device's engine that is there. It is no child of the daemon's if its fork server was killed."""
    return {device["name"]: device["pid"] for device in node.json("status")["devices"] if device["pid"]}


def leaks(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Returns what is held at the end and should not be, in words."""
    found = [f"at the end {name} is {after[name]}" for name in NONE_OF if after[name]]
    found += [f"{name}: {before[name]} before, {after[name]} after" for name in SAME if after[name] != before[name]]
    most_of = {"text_processes": MOST_TEXT, "scans": MOST_SCANS, "stored": MOST_STORED, "fork_servers": MOST_FORK_SERVERS}
    for name, most in most_of.items():
        if after[name] > most:
            found.append(f"at the end {name} is {after[name]}, more than {most}")
    for process, was in before.items():
        for what, more in MORE.get(process.split(" ")[0], {}).items():
            if process in after and after[process][what] > was[what] + more:
                found.append(f"{what} of the {process}: {was[what]} before, {after[process][what]} after")
    return found


def _of(process: psutil.Process) -> dict[str, Any]:
    return {
        "descriptors": process.num_fds(),
        "mappings": len(process.memory_maps(grouped=False)),
        "threads": process.num_threads(),
        # An engine keeps mapped what it has touched of the host tier and of its device's chunks: shared memory with its own limits.
        "anonymous_mib": round(anonymous_bytes(process.pid) / 2**20, 1),
    }


def _kinds(daemon: psutil.Process) -> Counter[str]:
    return Counter(_kind(child) for child in daemon.children(recursive=True))


def _kind(process: psutil.Process) -> str:
    try:
        name, words = process.name(), process.cmdline()
        if process.status() == psutil.STATUS_ZOMBIE:
            return "zombies"
    except psutil.NoSuchProcess:
        return "ended"
    if name.startswith("engine "):
        return "engines"
    if name == "fork server":
        return "fork_servers"
    return "text_processes" if TEXT in words else "scans" if SCANNING in words else "other_processes"


def _chunks_in_use(node: ServiceNode) -> int:
    return sum((_chunks(node, "weights") + _chunks(node, "kv")).values())


def _chunks(node: ServiceNode, state: str = "") -> Counter[str]:
    """Returns the chunks of each device in this state, or all of them."""
    found = Counter[str]()
    for line in node.get("/metrics")[1].splitlines():
        if told := CHUNKS.fullmatch(line):
            found[told["device"]] += int(float(told["chunks"])) if state in ("", told["state"]) else 0
    return found
