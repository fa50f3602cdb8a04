"""The first minute of a fresh install: a daemon whose kernels are not compiled yet, and a client that does not wait.

A stream of tokens of one model is asked for as soon as the daemon is ready, again and again until its kernels are in use and 10 s
more (those that only sampling calls are left out while the stream is greedy, because they wait until it ends); then the same of a
daemon that finds them compiled. Told: seconds from ready to the first token and to the kernels' use, and from the first token to
the first whole second at nine tenths of the later speed, and to half of it; tokens a second before and after; how many requests
were refused; the most memory that the engine process and the processes that compile had (RSS), beside the engine's of the second
daemon; the processor time that compiling took, which tells more than seconds where others use the machine.

usage: python -m benchmarks.first_minute [--model mid] [--temperature 1] [--rounds 3] [--checkpoints FOLDER]
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import statistics
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import psutil

from benchmarks.checkpoints import make
from benchmarks.server import ROOT, Server
from engine.host.processor import this_processor

FIRST_TOKEN_S, FULL_SPEED_S = 5.0, 30.0  # the bars, from ready and from the first token
TAIL_S = 10.0
MIB = 1 << 20


class Client:
    """One stream after the other; `stamps` of its tokens."""

    def __init__(self, url: str, model: str, temperature: float) -> None:
        self.stamps: list[float] = []
        self.refused: list[str] = []
        self.done = False
        self._url, self._model, self._temperature = url, model, temperature
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        body = {"model": self._model, "prompt": list(range(300, 364)), "max_tokens": 256, "stream": True}
        data = json.dumps(body | {"ignore_eos": True, "temperature": self._temperature}).encode()
        while not self.done:
            asked = urllib.request.Request(self._url + "/v1/completions", data, {"Content-Type": "application/json"})
            try:
                with urllib.request.urlopen(asked, timeout=120) as answer:
                    for line in answer:
                        if line.startswith(b'data: {"error"'):
                            self.refused.append(line.decode())
                        elif line.startswith(b"data: {"):
                            self.stamps.append(time.perf_counter())
                        if self.done:
                            return
            except urllib.error.HTTPError as error:
                self.refused.append(f"{error.code} {error.read().decode()}")
                time.sleep(0.5)

    def end(self) -> None:
        self.done = True
        self._thread.join(30)


def rss(process: psutil.Process) -> int:
    with contextlib.suppress(psutil.Error):
        return int(process.memory_info().rss)
    return 0


def processor_s(process: psutil.Process) -> float:
    with contextlib.suppress(psutil.Error):
        times = process.cpu_times()
        return float(times.user + times.system)
    return 0.0


def speed(stamps: list[float], begin_s: float, end_s: float) -> float:
    """Tokens a second."""
    return sum(begin_s <= stamp < end_s for stamp in stamps) / (end_s - begin_s) if end_s > begin_s else 0.0


def alone_s(folder: Path, cache_dir: Path) -> float:
    """Measures the time from ready to the kernels' use, of a daemon that gets no requests."""
    with Server(folder.parent, ["cpu=2GiB"], cache_dir=cache_dir) as server:
        ready_s, was_told = time.perf_counter(), False
        while time.perf_counter() - ready_s < 300:
            (device,) = server.cli("status", "--json")["devices"]
            if was_told and device["kernels"] is None:
                return time.perf_counter() - ready_s
            was_told = was_told or device["kernels"] is not None
            time.sleep(0.25)
        raise RuntimeError(f"kernels are not in use after 300 s\n{server.log_end()}")


def run(folder: Path, cache_dir: Path | None, temperature: float) -> dict[str, Any]:
    with Server(folder.parent, ["cpu=2GiB"], cache_dir=cache_dir) as server:
        ready_s = time.perf_counter()
        client = Client(server.url, folder.name, temperature)
        engine_rss = compilers_rss = 0
        compilers_s: dict[int, float] = {}  # process -> processor time
        in_use_s, was_told = None, False
        while in_use_s is None or time.perf_counter() - in_use_s < TAIL_S:
            (device,) = server.cli("status", "--json")["devices"]
            is_slower = device["kernels"] is not None and not device["kernels"]["postponed"]
            was_told = was_told or is_slower
            waited_s = time.perf_counter() - ready_s
            if in_use_s is None and not is_slower and client.stamps and (was_told or cache_dir is None or waited_s > 20):
                in_use_s = time.perf_counter()
            for engine in (one for one in server.engines() if one.pid == device["pid"]):
                engine_rss = max(engine_rss, rss(engine))
                compilers = engine.children(recursive=True)
                compilers_rss = max(compilers_rss, sum(map(rss, compilers)))
                for one in compilers:
                    compilers_s[one.pid] = max(processor_s(one), compilers_s.get(one.pid, 0.0))
            if waited_s > 300:
                raise RuntimeError(f"kernels are not in use after 300 s\n{server.log_end()}")
            time.sleep(0.25)
        client.end()
    stamps, end_s = client.stamps, client.stamps[-1]
    after = speed(stamps, in_use_s + 1, end_s)
    seconds = range(int(end_s - stamps[0]))
    half, full = (
        next((at for at in seconds if speed(stamps, stamps[0] + at, stamps[0] + at + 1) >= share * after), None)
        for share in (0.5, 0.9)
    )
    return {
        "first_token_s": round(stamps[0] - ready_s, 2),
        "kernels_in_use_s": round(in_use_s - ready_s, 1),
        "half_speed_s": half,
        "full_speed_s": full,
        "tokens_per_s_before": round(speed(stamps, stamps[0] + 1, in_use_s - 1), 1),
        "tokens_per_s_after": round(after, 1),
        "refused": len(client.refused),
        "longest_gap_s": round(max(b - a for a, b in itertools.pairwise(stamps)), 3),
        "engine_mib": engine_rss // MIB,
        "compilers_mib": compilers_rss // MIB,
        "compilers_processor_s": round(sum(compilers_s.values()), 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.first_minute", description=__doc__)
    parser.add_argument("--model", default="mid")
    parser.add_argument("--checkpoints", type=Path, default=ROOT / ".cache" / "checkpoints")
    parser.add_argument("--temperature", type=float, default=0.0, help="of the stream's choices; 0: it is greedy")
    parser.add_argument("--rounds", type=int, default=1)
    options = parser.parse_args()
    folder = make(options.checkpoints, options.model)
    with tempfile.TemporaryDirectory() as alone:
        models = Path(alone) / "models"
        models.mkdir()
        (models / folder.name).symlink_to(folder, target_is_directory=True)
        fresh = [run(models / folder.name, Path(alone) / f"cache{at}", options.temperature) for at in range(options.rounds)]
        nobody_asks_s = alone_s(models / folder.name, Path(alone) / "cache")
        compiled = run(models / folder.name, None, options.temperature)
    line = {
        "benchmark": "first_minute",
        "model": options.model,
        "temperature": options.temperature,
        "processor": sorted(this_processor().features),
        "fresh": {key: statistics.median(one[key] for one in fresh) for key in fresh[0]},
        "compiled": compiled,
        "kernels_in_use_alone_s": round(nobody_asks_s, 1),
        "bars": {"first_token_s": FIRST_TOKEN_S, "full_speed_s": FULL_SPEED_S, "refused": 0},
    }
    print(json.dumps(line))
    print(f"kernels in use of a daemon that nobody asks for anything: {nobody_asks_s:.1f} s", file=sys.stderr)
    print(f"{'':24}{'fresh':>10}{'compiled':>10}", file=sys.stderr)
    for key, value in line["fresh"].items():
        print(f"{key:24}{value:>10}{compiled[key]:>10}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
