"""A daemon for the demo: started and stopped, its commands shown as they are run."""

from __future__ import annotations

import json
import os
import pathlib
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from types import TracebackType
from typing import Any

import psutil

ROOT = pathlib.Path(__file__).resolve().parent.parent
DIM, RESET = ("\x1b[2m", "\x1b[0m") if sys.stdout.isatty() else ("", "")


class DemoNode:
    """`with DemoNode(models, devices, flags) as node:`; the daemon is ready when the block begins and gone when it ends."""

    def __init__(self, models: pathlib.Path, devices: list[str], flags: list[str]) -> None:
        self._models, self._devices, self._flags = models, devices, flags

    def __enter__(self) -> DemoNode:
        folder = ROOT / ".demo"
        shutil.rmtree(folder / "state", ignore_errors=True)
        folder.mkdir(exist_ok=True)
        self.log = folder / "hearthd.log"
        control = folder / "control.sock"
        self._short = None
        if len(str(control)) > 100:
            # a Unix socket's path may have 107 bytes; a deep clone gets a short folder of its own, removed at the end
            self._short = tempfile.mkdtemp(prefix="hearth-demo-")
            control = pathlib.Path(self._short) / "control.sock"
        self.control_shown = str(control.relative_to(ROOT)) if control.is_relative_to(ROOT) else str(control)
        arguments = ["--models", os.path.relpath(self._models, ROOT), "--listen", "127.0.0.1:0", "--control", self.control_shown]
        for device in self._devices:
            arguments += ["--device", device]
        arguments += [*self._flags, "--state-dir", ".demo/state", "--cache-dir", ".demo/cache"]
        print(f"\n{DIM}$ {shlex.join(['hearthd', *arguments])}{RESET}", flush=True)
        start = time.perf_counter()
        with self.log.open("wb") as log:
            # its own process group: Ctrl-C is answered here, by SIGTERM
            self._process = subprocess.Popen(
                [sys.executable, "-m", "daemon", *arguments], cwd=ROOT, stdout=log, stderr=log, start_new_session=True
            )
        self.pid = self._process.pid
        try:
            self._wait_until_ready(60)
        except BaseException:
            self._stop()
            raise
        print(f"Ready after {time.perf_counter() - start:.1f} s: {self.url} (its log: .demo/hearthd.log)", flush=True)
        return self

    def _wait_until_ready(self, limit_s: float) -> None:
        end = time.perf_counter() + limit_s
        while time.perf_counter() < end:
            if self._process.poll() is not None:
                raise SystemExit(f"hearthd ended with {self._process.returncode}:\n{self.log.read_text()[-2000:]}")
            status = self._json("status")
            if isinstance(status, dict) and status.get("ready"):
                self.url = str(status["url"])
                return
            time.sleep(0.1)
        raise SystemExit(f"hearthd is not ready after {limit_s:.0f} s:\n{self.log.read_text()[-2000:]}")

    def _command(self, *args: str) -> list[str]:
        return [sys.executable, "-m", "daemon.cli", "--control", self.control_shown, *args]

    def _json(self, *args: str) -> Any:
        done = subprocess.run([*self._command(*args), "--json"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
        try:
            return json.loads(done.stdout)
        except ValueError:
            return None

    def hearth(self, *args: str) -> None:
        """Runs a command of `hearth` and shows it with what it prints."""
        print(f"{DIM}$ {shlex.join(['hearth', '--control', self.control_shown, *args])}{RESET}", flush=True)
        subprocess.run(self._command(*args), cwd=ROOT, timeout=120, check=False)

    def events(self) -> list[dict[str, Any]]:
        command = [*self._command("events"), "--json"]
        out = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True).stdout
        return [json.loads(line) for line in out.splitlines() if line.startswith("{")]

    def evictions(self) -> list[str]:
        """Names of the models evicted so far, in order."""
        return [e["model"] for e in self.events() if e.get("event") == "evicted"]

    def load_seconds(self) -> list[float]:
        return [float(e["seconds"]) for e in self.events() if e.get("event") == "loaded"]

    def output_tokens(self) -> int:
        return int(self._json("status")["output_tokens"])

    def resident_beside(self, model: str) -> str:
        """A ready model on another device than `model`'s."""
        rows = {row["name"]: row for row in self._json("ps")}
        return next(name for name, row in rows.items() if row["state"] == "ready" and row["device"] != rows[model]["device"])

    def engine_pid(self, model: str) -> int:
        """Process id of the engine that holds `model`."""
        device = next(row["device"] for row in self._json("ps") if row["name"] == model)
        return int(next(d["pid"] for d in self._json("status")["devices"] if d["name"] == device))

    def cpu_s(self) -> float:
        """User + system seconds of the daemon and all processes below it, those that ended included."""
        root = psutil.Process(self.pid)
        total = 0.0
        for process in [root, *root.children(recursive=True)]:
            times = process.cpu_times()
            total += times.user + times.system + times.children_user + times.children_system
        return total

    def alive(self) -> bool:
        return self._process.poll() is None

    def _stop(self) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        if self._short:
            shutil.rmtree(self._short, ignore_errors=True)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stop()
