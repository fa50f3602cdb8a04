"""Background jobs of an engine that has no memory for their threads, or whose work fails: each is reported as failed, and the
engine goes on."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from engine.contracts.loads import LoadTask
from engine.lifecycle.kv_transfer import KVTransfer
from engine.lifecycle.loads import Load, Loads
from engine.null.runner import NullRunner
from engine.serve.adapter_loads import AdapterRead
from engine.serve.served_models import Place
from tests.engine.engine_process import load_message, null_configure

OAK = load_message("/nowhere", "oak")


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> Loads:
    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    return Loads(NullRunner(null_configure()))


def begun(loads: Loads) -> Load:
    return loads.start(OAK, Place(np.zeros(1, np.int32), np.zeros(0, np.int32)))


def test_a_load(loads: Loads) -> None:
    load = begun(loads)
    assert loads.take() == [load]
    assert isinstance(load.error, MemoryError)
    assert load.hosted is None


def test_a_copy_of_kv(loads: Loads) -> None:
    served: Any = SimpleNamespace(spec=OAK)
    transfer = KVTransfer(served, [], [], np.zeros((0, 1), np.int32), True, [], None)
    loads.copy(transfer)
    (told,) = loads.take()
    assert told is transfer
    assert isinstance(transfer.error, MemoryError)


def test_the_reading_of_an_adapter(loads: Loads) -> None:
    source: Any = SimpleNamespace(name="red")
    read = AdapterRead("oak", source, source, 0.0)
    loads.read(read)
    assert loads.take() == [read]
    assert isinstance(read.error, MemoryError)


def test_a_checksum_stays_unknown(loads: Loads, caplog: pytest.LogCaptureFixture) -> None:
    load = begun(loads)
    loads.take()
    loads.sum_up(load, lambda: 1)
    assert loads.take() == []
    assert "the weights of oak do not outlive this engine: thread checksum of oak: can't start new thread" in caplog.text


def test_a_checksum_that_cannot_be_computed_is_told(caplog: pytest.LogCaptureFixture) -> None:
    loads = Loads(NullRunner(null_configure()))
    task = LoadTask(OAK, np.zeros(1, np.int32), lambda done, total: None, lambda: False)
    load = Load(task, Place(task.chunks, np.zeros(0, np.int32)), 0.0, threading.Event())

    def fails() -> int:
        raise MemoryError("no memory for the sums")

    loads.sum_up(load, fails)
    until_s = time.monotonic() + 10.0
    while not caplog.records and time.monotonic() < until_s:
        time.sleep(1e-3)
    assert "the weights of oak do not outlive this engine: no memory for the sums" in caplog.text
    assert loads.take() == []
