"""Starts a daemon to measure: free port, its own folders, stopped at the end whatever happens."""

from __future__ import annotations

import functools
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from types import TracebackType
from typing import Any

import psutil

ROOT = pathlib.Path(__file__).resolve().parent.parent
CACHE = ROOT / ".cache"
KEPT_LOGS = "HEARTH_BENCH_LOGS"  # a folder: what daemons logged is kept there


@functools.cache
def compile_kernels() -> None:
    """Compiles the kernels, so that no figure is of a model that is served without them."""
    command = [sys.executable, "-m", "engine.warm", str(CACHE), "--int8"]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


def without_drafts(models: pathlib.Path, file: pathlib.Path) -> pathlib.Path:
    """Writes and returns a configuration by which every model takes a step for each token."""
    names = []
    for folder, below, files in os.walk(models, followlinks=True):
        if "config.json" in files:
            names.append(os.path.relpath(folder, models))
            below.clear()
    file.write_text("".join(f'[models."{name}"]\nspeculator = "none"\n' for name in sorted(names)))
    return file


class Server:
    """`with Server(models, ["cpu=2GiB"]) as server:`; ready when the block begins. `ready_s` is process start to /readyz.

    Unless flags name a configuration, nothing is drafted for its models: greedy texts of random weights repeat themselves, and
    drafts would make them faster than any text that means something (benchmarks/drafts.py measures what drafts give).
    cache_dir: of compiled kernels; None: the checkout's, with all kernels in it before the daemon starts."""

    def __init__(
        self, models: pathlib.Path, devices: list[str], flags: list[str] | None = None, cache_dir: pathlib.Path | None = None
    ) -> None:
        self._models, self._devices, self._flags = models, devices, flags or []
        self._cache_dir = cache_dir or CACHE
        if cache_dir is None and any(device.startswith("cpu") for device in devices):
            compile_kernels()

    def __enter__(self) -> Server:
        self._folder = tempfile.TemporaryDirectory(prefix="hearth-bench-")
        folder = pathlib.Path(self._folder.name)
        self.control = str(folder / "control.sock")
        self.log = folder / "log"
        command = [
            sys.executable,
            "-m",
            "daemon",
            "--models",
            str(self._models),
            "--listen",
            "127.0.0.1:0",
            "--control",
            self.control,
        ]
        command += ["--state-dir", str(folder / "state"), "--cache-dir", str(self._cache_dir)]
        for device in self._devices:
            command += ["--device", device]
        if "--config" not in self._flags:
            command += ["--config", str(without_drafts(self._models, folder / "node.toml"))]
        start = time.perf_counter()
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(command + self._flags, cwd=ROOT, stderr=log, stdout=subprocess.DEVNULL)
        self.pid = self._process.pid
        try:
            while True:
                if self._process.poll() is not None:
                    raise RuntimeError(f"hearthd ended with {self._process.returncode}:\n{self.log.read_text()[-2000:]}")
                if pathlib.Path(self.control).exists():
                    self.url = self.cli("status", "--json", check=False).get("url", "")
                    if self.url and self._ready():
                        break
                if time.perf_counter() - start > 60:
                    raise RuntimeError(f"hearthd is not ready after 60 s:\n{self.log.read_text()[-2000:]}")
                time.sleep(0.01)
        except BaseException:
            self._process.kill()
            raise
        self.ready_s = time.perf_counter() - start
        return self

    def _ready(self) -> bool:
        try:
            with urllib.request.urlopen(self.url + "/readyz", timeout=5) as response:
                return bool(response.status == 200)
        except OSError:
            return False

    def cli(self, *args: str, check: bool = True) -> Any:
        """`hearth …`; the JSON it prints, or {}."""
        try:
            return json.loads(self.text(*args, check=check))
        except ValueError:
            return {}

    def text(self, *args: str, check: bool = True) -> str:
        """`hearth …`; what it prints."""
        command = [sys.executable, "-m", "daemon.cli", "--control", self.control, *args]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
        if check and done.returncode:
            raise RuntimeError(f"hearth {' '.join(args)}: exit {done.returncode}: {done.stderr[-500:]}")
        return done.stdout

    def metric(self, name: str) -> float:
        """Returns the value of one line of /metrics, named with its labels; 0 if there is none."""
        with urllib.request.urlopen(self.url + "/metrics", timeout=30) as response:
            lines = response.read().decode().splitlines()
        return next((float(line.rpartition(" ")[2]) for line in lines if line.rpartition(" ")[0] == name), 0.0)

    def log_end(self) -> str:
        return self.log.read_text(errors="replace")[-2000:] if self.log.exists() else ""

    def engines(self) -> list[psutil.Process]:
        """The engine processes, by command line."""
        return [p for p in psutil.Process(self.pid).children(recursive=True) if p.name().startswith("engine ")]

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kept := os.environ.get(KEPT_LOGS):
            self._keep(pathlib.Path(kept))
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(15)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._folder.cleanup()

    def _keep(self, folder: pathlib.Path) -> None:
        """Appends the daemon's log and its list of placements to a file."""
        with (folder / "daemons.log").open("a") as file:
            file.write(f"==== {' '.join(sys.argv)}\n{self.log.read_text(errors='replace')}")
            file.write(self.text("history", "--json", check=False))
