"""An engine that runs for a daemon on another host, and its end."""

from __future__ import annotations

import os
import select
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn, cast

import pytest

from daemon.engines.exchange_memory import ExchangeMemory
from daemon.lending import lent_engine
from daemon.lending.lent_engine import LentDevice, LentEngine
from daemon.lending.regions import LentRegions
from engine.remote.wire import Wire, WireClosed

ENDS_AFTER_S = 0.5  # many times the limits of the test


class SlowToEnd:
    """An EngineProcess that ends some time after it was killed, as one does that waits in a driver."""

    made: SlowToEnd

    def __init__(self, arguments: Sequence[str], descriptors: Sequence[int], variables: dict[str, str]) -> None:
        self.process = subprocess.Popen(["sleep", "60"], stderr=subprocess.PIPE)
        assert self.process.stderr is not None
        self.pid, self.stderr, self.pidfd = self.process.pid, self.process.stderr, os.pidfd_open(self.process.pid)
        SlowToEnd.made = self

    def kill(self) -> None:
        threading.Timer(ENDS_AFTER_S, self.process.kill).start()

    def wait(self) -> int:
        return self.process.wait()

    def close(self) -> None:
        poller = select.poll()
        poller.register(self.pidfd, select.POLLIN)
        self.is_over = bool(poller.poll(0))
        os.close(self.pidfd)


class Gone:
    """The wire of a daemon that is gone."""

    def receive(self) -> NoReturn:
        raise WireClosed("the daemon is gone")

    def send(self, frame: Any) -> None: ...

    def shut(self) -> None: ...


def test_a_device_is_free_only_when_its_engine_has_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(lent_engine, "Spawned", SlowToEnd)
    monkeypatch.setattr(lent_engine, "END_LIMIT_S", 0.02)
    regions = LentRegions(ExchangeMemory(["cpu:0"]))
    device = LentDevice("cpu:0", 64 << 20, "", 1)
    engine = LentEngine(device, cast(Wire, Gone()), "there", regions, str(tmp_path), "", lambda line: None)
    assert engine.run() == "the daemon is gone"
    assert SlowToEnd.made.is_over
    regions.memory.close()
