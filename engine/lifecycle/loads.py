"""Runs loads and copies of KV in the background, each in a thread of its own, while steps of other models run."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from engine.contracts.loads import CompilesKernels, KernelNews, LoadCancelled, LoadTask, Runner
from engine.contracts.steps import HostedEncoder, HostedModel, StreamedModel
from engine.lifecycle import throttle
from engine.lifecycle.first_step import FirstStep
from engine.lifecycle.kv_transfer import KVTransfer
from engine.memory.weight_gate import WeightGate
from engine.protocol import LoadModel, LoadProgress
from engine.serve.adapter_loads import AdapterRead
from engine.serve.served_models import Place
from loader.threads import Thread

log = logging.getLogger("engine")

PROGRESS_EVERY_S = 0.1


@dataclass(slots=True)
class Load:
    """The load that one LoadModel message asked for. When its thread is done, exactly one of `hosted` (the loaded model) and
    `error` is set. place: the chunks of the model. started_s: by time.monotonic(). cancelled: set to cancel the load. seconds: how
    long it took."""

    task: LoadTask
    place: Place
    started_s: float
    cancelled: threading.Event
    hosted: HostedModel | HostedEncoder | None = None
    error: Exception | None = None
    seconds: float = 0.0
    gate: WeightGate | None = None  # set if a step may run while the weights arrive


@dataclass(slots=True)
class Begun:
    """Reports that a load's model exists, complete except for its weights, which are still arriving. hosted: the model."""

    load: Load
    hosted: StreamedModel


@dataclass(slots=True)
class Streams:
    """Reports, some time after Begun, that the weights which a step needs first have arrived, so that the first step of the load's
    model can begin."""

    load: Load


@dataclass(slots=True)
class Summed:
    """Reports that the checksum of a load's weights has been computed; it is in load.task.weights_checksum."""

    load: Load


Report = AdapterRead | KernelNews | LoadProgress | Load | Begun | Streams | FirstStep | KVTransfer | Summed


class Loads:
    """Runs loads and other background jobs in threads, and collects their reports for the engine's loop, together with news about
    kernels that are being compiled. An eventfd signals reports, so the loop can sleep until one comes."""

    def __init__(self, runner: Runner, test_disk_bytes_per_s: int = 0, test_copy_bytes_per_s: int = 0) -> None:
        """runner: loads models. test_disk_bytes_per_s, test_copy_bytes_per_s: limits for tests (engine/lifecycle/throttle.py); 0:
        none."""
        self._runner = runner
        self._disk_bytes_per_s, self._copy_bytes_per_s = test_disk_bytes_per_s, test_copy_bytes_per_s
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._reports: deque[Report] = deque()
        if isinstance(runner, CompilesKernels):
            runner.watch_kernels(self._report)

    def fileno(self) -> int:
        return self._wake_fd

    def start(self, spec: LoadModel, place: Place) -> Load:
        """Starts a load in a thread, and returns it. `take` then returns the reports of this load: LoadProgress; Begun and Streams,
        if its model exists before all weights have arrived; and the Load itself when it has ended."""
        last_s = 0.0

        def progress(bytes_done: int, bytes_total: int) -> None:
            nonlocal last_s
            now = time.monotonic()
            if now - last_s >= PROGRESS_EVERY_S:
                last_s = now
                self._report(LoadProgress(spec.placement_id, bytes_done, bytes_total))

        cancelled = threading.Event()
        task = LoadTask(spec, place.weights, progress, cancelled.is_set, place.left, place.kv)
        load = Load(task, place, time.monotonic(), cancelled)

        def begun(hosted: StreamedModel, gate: WeightGate) -> None:
            load.gate = gate
            gate.begun = lambda: self._report(Streams(load))
            self._report(Begun(load, hosted))

        if spec.group is None:  # a group's first step needs all its members
            load.task.begun = begun
        try:
            Thread(target=self._run, args=(load,), name=f"load {spec.model}").start()
        except MemoryError as error:
            self._end(load, error)
        return load

    def copy(self, transfer: KVTransfer) -> None:
        """Runs a transfer of KV in a thread; `take` returns the transfer when it has ended."""

        def work() -> None:
            started_s = time.monotonic()
            transfer.run()
            throttle.hold(started_s, transfer.num_bytes, self._copy_bytes_per_s, lambda: False)
            if self._copy_bytes_per_s:
                transfer.seconds = time.monotonic() - started_s
            self._report(transfer)

        self._begin(transfer, work, f"KV of {transfer.served.spec.model}")

    def read(self, read: AdapterRead) -> None:
        """Reads an adapter's files in a thread; `take` returns `read` when the reading has ended."""

        def work() -> None:
            read.run()
            self._report(read)

        self._begin(read, work, f"adapter {read.source.name}")

    def _begin(self, job: KVTransfer | AdapterRead, work: Callable[[], None], name: str) -> None:
        """Starts a thread that calls `work`, which does the job and then reports it to the engine's loop. If there is no memory for
        the thread, the job is reported with that error. name: the thread's name."""
        try:
            Thread(target=work, name=name).start()
        except MemoryError as error:
            job.error = error
            self._report(job)

    def sum_up(self, load: Load, checksum: Callable[[], int]) -> None:
        """Calls `checksum` in a thread, which computes the checksum of the weights of a load that has ended; `take` returns Summed
        when it is known. If that fails, or if there is no memory for the thread, the error is only logged, and the checksum stays
        unknown."""

        def unknown(error: Exception) -> None:
            log.warning("the weights of %s do not outlive this engine: %s", load.task.spec.model, error)

        def work() -> None:
            try:
                load.task.weights_checksum = checksum()
            except Exception as error:
                unknown(error)
            else:
                self._report(Summed(load))

        try:
            Thread(target=work, name=f"checksum of {load.task.spec.model}").start()
        except MemoryError as error:
            unknown(error)

    def step(self, work: Callable[[], None], first: FirstStep) -> None:
        """Calls `work`, which computes a model's first step, in a thread; `take` returns `first` when the step has ended. Raises
        MemoryError if there is no memory for the thread."""

        def run() -> None:
            work()
            self._report(first)

        Thread(target=run, name=f"first step of {first.served.spec.model}").start()

    def take(self) -> list[Report]:
        """Returns what the threads have reported since the last call, in order. If a Load is in the list, that load has ended."""
        try:
            os.eventfd_read(self._wake_fd)
        except BlockingIOError:
            return []
        reports: list[Report] = []
        while self._reports:
            reports.append(self._reports.popleft())
        return reports

    def _run(self, load: Load) -> None:
        try:
            load.hosted = self._runner.load(load.task)
            self._hold(load)
        except Exception as error:
            self._end(load, error)
        else:
            self._end(load)

    def _end(self, load: Load, error: Exception | None = None) -> None:
        """Ends a load: keeps its result and reports the load to the engine's loop. error: why it failed; None if it did not."""
        if error is not None and not isinstance(error, LoadCancelled):
            log.warning("load of %s failed: %s: %s", load.task.spec.model, type(error).__name__, error)
        load.error, load.seconds = error, time.monotonic() - load.started_s
        load.task.begun = None  # both refer to the load: cleared, to leave no reference cycle to the garbage collector
        if load.gate is not None:
            load.gate.begun = None
        self._report(load)
        if load.gate is not None and load.hosted is not None:  # no token may be sent before the load is reported
            load.gate.open()

    def _hold(self, load: Load) -> None:
        """Delays the end of a load that was faster than the limits for tests allow (test_disk_bytes_per_s,
        test_copy_bytes_per_s)."""
        task = load.task
        if task.bytes_read:
            throttle.hold(load.started_s, task.bytes_read, self._disk_bytes_per_s, task.cancelled)
        elif self._copy_bytes_per_s and load.hosted is not None and not task.adopted:
            throttle.hold(load.started_s, load.hosted.weights_bytes, self._copy_bytes_per_s, task.cancelled)
            task.copy_seconds = time.monotonic() - load.started_s

    def _report(self, item: Report) -> None:
        self._reports.append(item)
        os.eventfd_write(self._wake_fd, 1)
