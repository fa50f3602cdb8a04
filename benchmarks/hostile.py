"""Thousands of model folders that were made to hurt, beside 20 streams of a node that serves.

The bars: no neighbour is held for more than 100 ms and none fails; the daemon and its helper processes never grow by more than
64 MiB, and the scanning process, which ends when it is done, never takes more than that; every folder that looks like a model is
listed, with its reason if it cannot be served; and models that come afterwards are found. The exit code is 1 if one of them is
missed; `missed` of the result says which.
usage: python -m benchmarks.hostile [--folders N]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import shutil
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import psutil
import uvloop

from benchmarks.checkpoints import make
from benchmarks.load import drive
from benchmarks.run import machine
from benchmarks.serve import STORE
from benchmarks.server import Server
from tests.e2e.hostile_folders import is_to_be_listed, make_hostile
from tests.loader.checkpoints import write_checkpoint

NUM_STREAMS, STEP_MS = 20, 10.0
LIMIT_S = 300.0
MOST_GAP_MS, MOST_GROWN_MIB, MOST_SCAN_MIB = 100.0, 64.0, 64.0


def resident_bytes(pid: int) -> int:
    """Adds up the daemon and its helpers. Engines are not counted, nor is the scanning process, which ends."""
    daemon = psutil.Process(pid)
    helpers = [child for child in daemon.children(recursive=True) if not child.name().startswith("engine ") and not _is_scan(child)]
    return sum(process.memory_info().rss for process in (daemon, *helpers))


def scan_bytes(pid: int) -> int:
    return sum(child.memory_info().rss for child in psutil.Process(pid).children() if _is_scan(child))


def _is_scan(process: psutil.Process) -> bool:
    return "daemon.scanning" in process.cmdline()


def wait_until_idle(pid: int) -> None:
    """Until the scanning process has ended, which it does some seconds after its last scan."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        if not any(map(_is_scan, psutil.Process(pid).children())):
            return
        time.sleep(0.5)


class Highest:
    """The highest sum of resident bytes seen, and the highest of the scanning process alone, looked at ten times a second."""

    def __init__(self, pid: int) -> None:
        self.bytes, self.scan_bytes, self._pid = 0, 0, pid

    async def watch(self) -> None:
        while True:
            with contextlib.suppress(psutil.Error):  # a process ended meanwhile
                self.bytes = max(self.bytes, await asyncio.to_thread(resident_bytes, self._pid))
                self.scan_bytes = max(self.scan_bytes, await asyncio.to_thread(scan_bytes, self._pid))
            await asyncio.sleep(0.1)


def make_folders(models: Path, folder: Path, num_folders: int) -> None:
    for number in range(num_folders):
        make_hostile(models / f"bad-{number:05}", folder / "template", number)


def wait_until_listed(url: str, model: str) -> None:
    end = time.monotonic() + LIMIT_S
    while time.monotonic() < end:
        with urllib.request.urlopen(f"{url}/v1/models", timeout=30) as answer:
            if f'"{model}"'.encode() in answer.read():
                return
        time.sleep(0.5)


def missed(line: dict[str, Any]) -> list[str]:
    """Returns the bars that a result misses, in words."""
    bars = {
        f"a stream waited for more than {MOST_GAP_MS:g} ms": max(line["client_gap_max_ms"], line["stall_max_ms"]) > MOST_GAP_MS,
        "requests failed": line["failed_requests"] > 0,
        f"grown by more than {MOST_GROWN_MIB:g} MiB": max(line["grown_mib"], line["grown_at_most_mib"]) > MOST_GROWN_MIB,
        f"the scanning process took more than {MOST_SCAN_MIB:g} MiB": line["scan_at_most_mib"] > MOST_SCAN_MIB,
        "folders are not listed": line["not_listed"] > 0,
        "folders have no reason": line["without_reason"] > 0,
        "discovery has ended": not (line["last_found"] and line["later_found"]),
        "a task of the daemon has failed": line["problems"] > 0,
    }
    return [words for words, is_missed in bars.items() if is_missed]


async def streams_beside(server: Server, write: Any) -> tuple[float, int]:
    """Longest gap in ms between two reads of any stream while `write` runs and the folders are found, and how many failed."""
    done = asyncio.Event()

    async def streams() -> tuple[float, int]:
        longest = failed = 0.0
        while not done.is_set():
            results = await drive(server.url, ["feather"], NUM_STREAMS, NUM_STREAMS, 64, 300)
            gaps = [b - a for r in results for a, b in zip(r.stamps, r.stamps[1:], strict=False)]
            longest, failed = max(longest, *gaps), failed + sum(not r.ok for r in results)
        return 1e3 * longest, int(failed)

    under_way = asyncio.ensure_future(streams())
    await asyncio.to_thread(write)
    done.set()
    return await under_way


def run(num_folders: int = 5000) -> list[dict[str, Any]]:
    source = make(STORE, "feather")
    with tempfile.TemporaryDirectory(prefix="hostile-", dir=STORE.parent) as folder:
        return [_run(num_folders, source, Path(folder))]


def _run(num_folders: int, source: Path, folder: Path) -> dict[str, Any]:
    shutil.copytree(source, folder / "models" / "feather")
    write_checkpoint(folder / "template")
    models: Path = folder / "models"
    flags = ["--runner", "null", "--null-step-ms", str(STEP_MS), "--loop-watch-ms", "0.5"]
    with Server(models, ["cpu=2GiB"], flags) as server:
        server.cli("load", "feather")
        uvloop.run(drive(server.url, ["feather"], 4, 4, 16, 8))
        quiet_ms, _ = uvloop.run(streams_beside(server, lambda: time.sleep(5)))
        pid = server.cli("status", "--json")["pid"]
        highest = Highest(pid)
        wait_until_idle(pid)
        before = resident_bytes(pid)

        def write() -> None:
            # a process of its own: in a thread it would hold the clients that measure
            writing = multiprocessing.get_context("spawn").Process(target=make_folders, args=(models, folder, num_folders))
            writing.start()
            writing.join()
            shutil.copytree(source, models / "last")
            wait_until_listed(server.url, "last")

        async def measured() -> tuple[float, int]:
            watching = asyncio.ensure_future(highest.watch())
            try:
                return await streams_beside(server, write)
            finally:
                watching.cancel()

        begin_s = time.monotonic()
        gap_ms, failed = uvloop.run(measured())
        seconds = time.monotonic() - begin_s
        stall_s = server.cli("status", "--json")["event_loop_stall_max_s"]  # before the rows of all models are asked for
        wait_until_idle(pid)
        after = resident_bytes(pid)
        shutil.copytree(source, models / "later")
        wait_until_listed(server.url, "later")
        rows = server.cli("models", "--json")
        status = server.cli("status", "--json")
    names = {row["name"].split("/")[0] for row in rows}
    made = [models / f"bad-{number:05}" for number in range(num_folders)]
    bad = [row for row in rows if row["name"].startswith("bad-")]
    line = {
        "benchmark": "hostile",
        "folders": num_folders,
        "listed": len(bad),
        "not_listed": sum(each.name not in names for each in made if is_to_be_listed(each)),
        "without_reason": sum(not row["reason"] for row in bad if row["state"] in ("incomplete", "refused")),
        "complete": sum(row["state"] not in ("incomplete", "refused") for row in bad),
        "last_found": "last" in names,
        "later_found": "later" in names,
        "problems": len(status["problems"]),
        "seconds": round(seconds, 1),
        "failed_requests": failed,
        "client_gap_max_ms_undisturbed": round(quiet_ms, 1),
        "client_gap_max_ms": round(gap_ms, 1),
        "stall_max_ms": round(1e3 * stall_s, 2),
        "grown_mib": round((after - before) / 2**20, 1),
        "grown_at_most_mib": round((highest.bytes - before) / 2**20, 1),
        "scan_at_most_mib": round(highest.scan_bytes / 2**20, 1),
    }
    return line | {"missed": missed(line)}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folders", type=int, default=5000)
    print(json.dumps(machine()), flush=True)
    for line in run(parser.parse_args().folders):
        print(json.dumps(line), flush=True)
        sys.exit(bool(line["missed"]))
