"""Loads and copies of KV under way: one thread each, while the other models step."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from engine.contracts import CompilesKernels, HostedEncoder, HostedModel, KernelNews, LoadCancelled, LoadTask, Runner, StreamedModel
from engine.kv_transfer import KVTransfer
from engine.loading import throttle
from engine.loading.weight_gate import WeightGate
from engine.protocol import LoadModel, LoadProgress
from engine.served_models import Place
from engine.steps.first import FirstStep

log = logging.getLogger("engine")

PROGRESS_EVERY_S = 0.1


@dataclass(slots=True)
class Load:
    """What became of one LoadModel. Exactly one of `hosted` and `error` is set when its thread is done."""

    task: LoadTask
    place: Place
    started_s: float
    cancelled: threading.Event
    withdrawn_by: list[int] = field(default_factory=list)  # placement ids of the EvictModel messages to answer
    hosted: HostedModel | HostedEncoder | None = None
    error: Exception | None = None
    seconds: float = 0.0
    gate: WeightGate | None = None  # of weights that a step may run behind


@dataclass(slots=True)
class Begun:
    """Of a load under way: the model is there but for its weights."""

    load: Load
    hosted: StreamedModel


@dataclass(slots=True)
class Streams:
    """Of a load that was told Begun: the weights that a step needs first are there."""

    load: Load


@dataclass(slots=True)
class Summed:
    """The checksum of a load's weights is known: task.weights_checksum."""

    load: Load


Told = KernelNews | LoadProgress | Load | Begun | Streams | FirstStep | KVTransfer | Summed


class Loads:
    """Starts loads and tells of them, and of kernels, through an eventfd, so the engine's loop can sleep."""

    def __init__(self, runner: Runner, test_disk_bytes_per_s: int = 0, test_copy_bytes_per_s: int = 0) -> None:
        """test_…: see engine/loading/throttle.py."""
        self._runner = runner
        self._disk_bytes_per_s, self._copy_bytes_per_s = test_disk_bytes_per_s, test_copy_bytes_per_s
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._told: deque[Told] = deque()
        self.running: dict[str, Load] = {}
        if isinstance(runner, CompilesKernels):
            runner.watch_kernels(self._tell)

    def fileno(self) -> int:
        return self._wake_fd

    def start(self, spec: LoadModel, place: Place) -> None:
        last_s = 0.0

        def progress(bytes_done: int, bytes_total: int) -> None:
            nonlocal last_s
            now = time.monotonic()
            if now - last_s >= PROGRESS_EVERY_S:
                last_s = now
                self._tell(LoadProgress(spec.placement_id, bytes_done, bytes_total))

        cancelled = threading.Event()
        task = LoadTask(spec, place.weights, progress, cancelled.is_set, place.left)
        load = Load(task, place, time.monotonic(), cancelled)

        def begun(hosted: StreamedModel, gate: WeightGate) -> None:
            load.gate = gate
            gate.begun = lambda: self._tell(Streams(load))
            self._tell(Begun(load, hosted))

        load.task.begun = begun
        self.running[spec.model] = load
        threading.Thread(target=self._run, args=(load,), name=f"load {spec.model}", daemon=True).start()

    def copy(self, transfer: KVTransfer) -> None:
        """Runs it; `take` tells when it is done."""

        def work() -> None:
            started_s = time.monotonic()
            transfer.run()
            throttle.hold(started_s, transfer.num_bytes, self._copy_bytes_per_s, lambda: False)
            if self._copy_bytes_per_s:
                transfer.seconds = time.monotonic() - started_s
            self._tell(transfer)

        threading.Thread(target=work, name=f"KV of {transfer.served.spec.model}", daemon=True).start()

    def sum_up(self, load: Load, checksum: Callable[[], int]) -> None:
        """Of a load that has ended; `take` tells when it is known."""

        def work() -> None:
            load.task.weights_checksum = checksum()
            self._tell(Summed(load))

        threading.Thread(target=work, name=f"checksum of {load.task.spec.model}", daemon=True).start()

    def step(self, work: Callable[[], None], first: FirstStep) -> None:
        """Runs it; `take` tells when it is done."""

        def run() -> None:
            work()
            self._tell(first)

        threading.Thread(target=run, name=f"first step of {first.served.spec.model}", daemon=True).start()

    def take(self) -> list[Told]:
        """What happened since the last call, in order; a finished Load is no longer in `running`."""
        try:
            os.eventfd_read(self._wake_fd)
        except BlockingIOError:
            return []
        told: list[Told] = []
        while self._told:
            item = self._told.popleft()
            if isinstance(item, Load):
                del self.running[item.task.spec.model]
            told.append(item)
        return told

    def _run(self, load: Load) -> None:
        try:
            load.hosted = self._runner.load(load.task)
            self._hold(load)
        except LoadCancelled as error:
            load.error = error
        except Exception as error:
            log.warning("load of %s failed: %s: %s", load.task.spec.model, type(error).__name__, error)
            load.error = error
        load.seconds = time.monotonic() - load.started_s
        load.task.begun = None  # these know the load: nothing may be left to the garbage collector
        if load.gate is not None:
            load.gate.begun = None
        self._tell(load)
        if load.gate is not None and load.hosted is not None:  # after it was told: no token comes before the load has ended well
            load.gate.open()

    def _hold(self, load: Load) -> None:
        """As slow as the test wants it."""
        task = load.task
        if task.bytes_read:
            throttle.hold(load.started_s, task.bytes_read, self._disk_bytes_per_s, task.cancelled)
        elif self._copy_bytes_per_s and load.hosted is not None and not task.adopted:
            throttle.hold(load.started_s, load.hosted.weights_bytes, self._copy_bytes_per_s, task.cancelled)
            task.copy_seconds = time.monotonic() - load.started_s

    def _tell(self, item: Told) -> None:
        self._told.append(item)
        os.eventfd_write(self._wake_fd, 1)
