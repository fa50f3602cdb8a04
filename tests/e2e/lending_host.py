"""`hearth lend` as another host would run it, on a port of this machine, for tests."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from pathlib import Path

from tests import kernel_cache
from tests.e2e.node import SAFETY_S, environment

KEY = "a key that both hosts know"


class LendingHost:
    """with LendingHost(folder, models) as host: a daemon whose settings contain `host.settings` may use devices named NAME@b.
    models: the models folder of that host. lines: what it has printed, once it was ended. It keeps its port when it is started
    again."""

    def __init__(self, folder: Path, models: Path, device: str = "cpu:0=48MiB") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._address = f"127.0.0.1:{free.getsockname()[1]}"
        self._key_file = folder / "lend.key"
        self._key_file.write_text(KEY + "\n")
        self._command = [
            *[sys.executable, "-P", "-m", "daemon.cli", "--json", "lend"],
            *["--listen", self._address, "--key-file", str(self._key_file)],
            *["--models", str(models), "--device", device, "--threads", "1", "--cache-dir", kernel_cache.CACHE_DIR],
        ]
        self.settings = f'[hosts.b]\naddress = "{self._address}"\nkey_file = "{self._key_file}"\n'
        self.process: subprocess.Popen[str] | None = None
        self.lines: list[str] = []

    def start(self) -> None:
        kernel_cache.warm()
        self.process = subprocess.Popen(self._command, stdout=subprocess.PIPE, text=True, env=environment())
        assert self.process.stdout is not None
        first = json.loads(self.process.stdout.readline())["text"]
        assert first.endswith(f"to be borrowed at {self._address}"), first

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Sends the signal and returns the exit code."""
        assert self.process is not None
        self.process.send_signal(number)
        out, _ = self.process.communicate(timeout=SAFETY_S)
        self.lines += [json.loads(line)["text"] for line in out.splitlines()]
        code, self.process = self.process.returncode, None
        return code

    def __enter__(self) -> LendingHost:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.process is not None:
            self.stop()
