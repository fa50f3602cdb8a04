"""A lender in this process, in the place of another host, for tests."""

from __future__ import annotations

import socket
from pathlib import Path
from threading import Thread

from daemon.lending.lender import Lender
from daemon.lending.lent_engine import LentDevice
from tests.kernel_cache import CACHE_DIR

KEY = "a key that both hosts know"


class OtherHost:
    """A lender of two devices. lines: what it has told operators."""

    def __init__(self, models: Path, budget_bytes: int = 96 * (64 << 10)) -> None:
        self.lines: list[str] = []
        self.listener = socket.create_server(("127.0.0.1", 0))
        devices = [LentDevice(name, budget_bytes, "", 1) for name in ("cpu:0", "cpu:1")]
        self.lender = Lender(devices, KEY.encode(), str(models), CACHE_DIR, self.lines.append)
        self.address = "{}:{}".format(*self.listener.getsockname())
        self._server = Thread(target=self.lender.serve, args=(self.listener,), daemon=True)
        self._server.start()

    def arguments(self, models: Path, device: str = "cpu:0", key: str = KEY) -> list[str]:
        """Returns the arguments of a proxy of an engine here. models: the models folder of the daemon's host."""
        (file := models.parent / "key").write_text(key + "\n")
        named = {"device": device, "host": "b", "address": self.address, "key-file": str(file), "models": str(models)}
        return [part for name, value in named.items() for part in (f"--{name}", value)]

    def close(self) -> None:
        self.lender.stop(self.listener)
        self._server.join(10)
        assert not self._server.is_alive()
        self.listener.close()
