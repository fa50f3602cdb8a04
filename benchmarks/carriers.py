"""Compares what could carry a pipeline's steps to another host: hearthd's own connection, gloo, Ray, and Ray with states by gloo.

Two processes of this machine, and for Ray two nodes on it. A round trip is the plan of 16 decoding rows one way and the states of
a step the other way, in milliseconds: the median of the rounds' medians, with how many times as long as hearthd's it is (the median
of the rounds' ratios). All carriers take turns in each round. Of all processes of a carrier: their number, listening TCP ports,
memory (PSS), and processor time in 20 idle seconds, scaled to a minute. cold: from the start of the first process, which for Ray is
that of its first node, to the first states. noticed: from kill -9 of the second process, while steps run, to the error in the
first; node noticed: the same where all processes of Ray's second node are killed. hearthd's connection and Ray have a secret to
prove (Ray its token), gloo has none. Ray takes part where it is installed; it listens on all interfaces while it runs.
usage: python -m benchmarks.carriers [--rounds 5] [--starts 3]: one JSON line and a table.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import secrets
import select
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

import psutil

from benchmarks.carrier_ends import GLOO, RAY, RAY_GLOO, SIZES, WIRE
from benchmarks.run import table
from benchmarks.server import ROOT
from engine.host.processor import this_processor

CALLS = {"8 KiB": 600, "128 KiB": 600, "4 MiB": 90}  # in each round
RAY_CALLS_SHARE = 3  # Ray makes a third of these calls
SETTLE_S, IDLE_S, STEPS_S, NOTICE_LIMIT_S = 10.0, 20.0, 1.5, 120.0
PR_SET_CHILD_SUBREAPER = 36


class FirstEnd:
    """A process with the first end of a carrier, which has answered once."""

    def __init__(self, carrier: str, folder: str, env: dict[str, str], address: str) -> None:
        command = [sys.executable, "-m", "benchmarks.carrier_ends", "first", carrier, folder, address]
        self._carrier = carrier
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env, cwd=ROOT)
        self.second_pid, self.plan_bytes = self.read(NOTICE_LIMIT_S).values()

    def tell(self, **order: int) -> None:
        assert self._process.stdin is not None
        print(json.dumps(order), file=self._process.stdin, flush=True)

    def read(self, limit_s: float) -> Any:
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], limit_s)[0]:
            raise SystemExit(f"nothing came from {self._carrier} in {limit_s} s")
        return json.loads(self._process.stdout.readline())

    def median_ms(self, num_bytes: int, calls: int) -> tuple[float, float]:
        """Returns the median and the 90th percentile of so many round trips."""
        self.tell(num_bytes=num_bytes, calls=calls)
        taken_s = sorted(self.read(NOTICE_LIMIT_S))
        return 1e3 * statistics.median(taken_s), 1e3 * taken_s[int(0.9 * len(taken_s))]

    def noticed_s(self, pids: list[int]) -> tuple[float, str]:
        """Kills processes while steps run. Returns how long it takes until a call fails, and its error."""
        self.tell(num_bytes=SIZES["128 KiB"])
        time.sleep(STEPS_S)
        begin_s = time.monotonic()
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        answer = self.read(NOTICE_LIMIT_S)
        return answer["at_s"] - begin_s, answer["error"]


class Carriers:
    """`with Carriers() as carriers:` has the folder and the Ray nodes of a measurement; all processes end with it."""

    def __enter__(self) -> Carriers:
        self._place = tempfile.TemporaryDirectory(prefix="hearth-carriers-")
        self._folder, self._address = self._place.name, ""
        pathlib.Path(self._folder, "key").write_text(secrets.token_hex(32))
        ray = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_USAGE_STATS_ENABLED": "0"}
        self._env = {**os.environ, **ray, "HOME": self._folder, "PYTHONPATH": str(ROOT)}
        return self

    def __exit__(self, *_: object) -> None:
        end_children()
        self._place.cleanup()

    def start(self, carrier: str) -> FirstEnd:
        if carrier in (RAY, RAY_GLOO) and not self._address:
            self._start_nodes()
        return FirstEnd(carrier, self._folder, self._env, self._address)

    def _start_nodes(self) -> None:
        """Starts two nodes, as an operator would on two hosts."""
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._address = f"127.0.0.1:{free.getsockname()[1]}"
        _, _, port = self._address.rpartition(":")
        first = ["--head", f"--port={port}", f"--temp-dir={self._folder}/ray", "--include-dashboard=false"]
        second = [f"--address={self._address}", '--resources={"second": 1}']
        for flags in (first, second):
            command = [str(pathlib.Path(sys.executable).with_name("ray")), "start", "--node-ip-address=127.0.0.1", "--num-cpus=1"]
            with open(f"{self._folder}/log", "ab") as log:  # no pipe: the nodes would keep it open
                subprocess.run(
                    [*command, "--object-store-memory=200000000", *flags], env=self._env, stdout=log, stderr=log, check=True
                )


def children() -> list[psutil.Process]:
    """Returns the processes that this one has started, and theirs; also those whose parent has ended (`main` asks for them)."""
    found = psutil.Process().children(recursive=True)
    return [process for process in found if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]


def end_children() -> None:
    while left := children():
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, timeout=5)


def at_rest() -> dict[str, float]:
    """Measures what the running carrier costs while nothing is sent."""
    time.sleep(SETTLE_S)
    before_s, begin_s = {process: _cpu_s(process) for process in children()}, time.monotonic()
    time.sleep(IDLE_S)
    wall_s, processes = time.monotonic() - begin_s, children()
    cpu_s = sum(_cpu_s(process) - before_s.get(process, 0.0) for process in processes)
    ports = {link.laddr for each in processes for link in each.net_connections("tcp") if link.status == psutil.CONN_LISTEN}
    return {
        "processes": len(processes),
        "ports": len(ports),
        "pss_mib": round(sum(process.memory_full_info().pss for process in processes) / 2**20),
        "idle_cpu_s_per_min": round(60 * cpu_s / wall_s, 2),
    }


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def starts_and_ends(carrier: str, starts: int) -> dict[str, Any]:
    """Starts a carrier several times, and kills its second end. The first time it is at rest for a while."""
    found: dict[str, Any] = {"cold_s": [], "noticed_s": [], "node_noticed_s": [], "errors": []}
    for number in range(starts):
        with Carriers() as carriers:
            begin_s = time.monotonic()
            first = carriers.start(carrier)
            found["cold_s"].append(round(time.monotonic() - begin_s, 2))
            if number == 0:
                found |= at_rest()
            kills = {"noticed_s": [first.second_pid]}
            if carrier in (RAY, RAY_GLOO):
                kills["node_noticed_s"] = []
            for kind, pids in kills.items():
                if not pids:
                    first = carriers.start(carrier)
                    raylet = psutil.Process(first.second_pid).parent()
                    pids = [raylet.pid, *(process.pid for process in raylet.children(recursive=True))]
                seconds, error = first.noticed_s(pids)
                found[kind].append(round(seconds, 4))
                found["errors"].append(error)
        print(carrier, found, file=sys.stderr, flush=True)
    return found


def round_trips(names: list[str], rounds: int) -> tuple[dict[str, dict[str, Any]], int]:
    """Returns for each carrier and size its milliseconds, and the bytes of a plan."""
    taken: dict[tuple[str, str], list[tuple[float, float]]] = {(name, size): [] for name in names for size in SIZES}
    with Carriers() as carriers:
        ends = {name: carriers.start(name) for name in names}
        for number in range(-1, rounds):  # round -1 warms up
            order = names[number % len(names) :] + names[: number % len(names)]
            for size, num_bytes in SIZES.items():
                for name in order:
                    calls = CALLS[size] // (RAY_CALLS_SHARE if name in (RAY, RAY_GLOO) else 1)
                    figures = ends[name].median_ms(num_bytes, calls)
                    if number >= 0:
                        taken[name, size].append(figures)
            print(f"round {number}: load {os.getloadavg()[0]:.1f}", file=sys.stderr, flush=True)
    found: dict[str, dict[str, Any]] = {name: {} for name in names}
    for (name, size), of_rounds in taken.items():
        medians, high = zip(*of_rounds, strict=True)
        found[name][size] = {
            "p50_ms": round(statistics.median(medians), 3),
            "p90_ms": round(statistics.median(high), 3),
            "p50_ms_of_rounds": [round(each, 3) for each in medians],
            "ratio": round(statistics.median(each / ours[0] for each, ours in zip(medians, taken[WIRE, size], strict=True)), 2),
        }
    return found, ends[WIRE].plan_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--starts", type=int, default=3)
    options = parser.parse_args()
    if ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise SystemExit("prctl failed: Ray's processes could not be found again")
    names, packages = [WIRE, GLOO], ["torch", "msgspec", "numpy"]
    if importlib.util.find_spec("ray") is not None:
        names, packages = [*names, RAY, RAY_GLOO], [*packages, "ray"]
    else:
        print("Ray takes no part: no module named ray in this Python (pip install ray)", file=sys.stderr)
    begin_load = os.getloadavg()[0]
    trips, plan_bytes = round_trips(names, options.rounds)
    rows = [{"carrier": name, **trips[name], **starts_and_ends(name, options.starts)} for name in names]
    about = {
        "processor": this_processor().describe(),
        "cores": psutil.cpu_count(),
        "load_1min": [round(begin_load, 1), round(os.getloadavg()[0], 1)],
        "versions": {name: importlib.metadata.version(name) for name in packages},
        "plan_bytes": plan_bytes,
    }
    print(json.dumps({"benchmark": "carriers", **about, "rows": rows}))
    shown = []
    for row in rows:
        line = {key: value for key, value in row.items() if key not in (*SIZES, "errors")}
        line |= {size: f"{row[size]['p50_ms']} ({row[size]['ratio']})" for size in SIZES}
        line |= {key: statistics.median(row[key]) if row[key] else "" for key in ("cold_s", "noticed_s", "node_noticed_s")}
        shown.append(line)
    print(f"\n{table(shown, {key: f'{key} ms (ratio)' if key in SIZES else key.replace('_', ' ') for key in shown[0]})}")


if __name__ == "__main__":
    main()
