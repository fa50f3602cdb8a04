"""Compiles CPU kernels in separate processes, which give all their memory back at their end, while torch's operations serve the
models.

An engine asks for the kernels that a model's dtype needs (`need`). Those in the cache folder are used at once. The rest is handed
out, unit by unit, to processes that end when all is done: python -P -m engine.warm --unit-by-unit. A compiler that crashes does not
take the engine with it: its unit is not tried again, and models of the dtype continue with torch's operations. So they do
where the cache folder did not keep what was compiled.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import TypeVar

from engine.contracts.loads import KernelNews
from engine.cpu.kernels.wanted import Unit, prepare_calls, units
from engine.host import compiled
from engine.host.child_process import COMPILER_BYTES, MOST_COMPILERS, child_environment
from engine.host.saved_code import make_only_what_is_saved
from engine.protocol import KernelsTold

log = logging.getLogger("engine")
_T = TypeVar("_T")

TELL_EVERY_S = 1.0
START_S = 2.0  # a process needs this long to import what it compiles with
KEPT_BYTES = COMPILER_BYTES * 3 // 4  # a process with more memory than this compiles nothing more


@dataclass(slots=True, frozen=True)
class _Kind:
    """The kernels that models of one dtype and quantisation need. quantize "adapters": what LoRA adapters need; "ranks": what
    models need that are split over devices."""

    dtype: str
    quantize: str

    def __str__(self) -> str:
        if self.quantize == "adapters":
            return f"{self.dtype} with LoRA adapters"
        if self.quantize == "ranks":
            return f"{self.dtype} of models that are split"
        return f"{self.dtype} with {self.quantize} weights" if self.quantize else self.dtype


class _Progress:
    """The progress of compiling one kind of kernels, and an estimate of how long the rest will take."""

    def __init__(self, missing: Sequence[Unit], num_processes: int) -> None:
        self.num_units, self.num_done = len(missing), 0
        self.problem = self.not_started = ""  # how the process of a failed unit ended; why no process started
        self.since_s = time.monotonic()
        self._num_processes = num_processes
        self._all_s = sum(unit.seconds for unit in missing)
        self._longest_s = max(unit.seconds for unit in missing)
        self._done_s = 0.0
        self._lock = threading.Lock()

    def done(self, unit: Unit) -> None:
        with self._lock:
            self.num_done += 1
            self._done_s += unit.seconds

    @property
    def left_s(self) -> float:
        with self._lock:
            passed_s, done_s = time.monotonic() - self.since_s, self._done_s
            planned_s = START_S + max(self._longest_s, self._all_s / self._num_processes)
            if done_s >= self._all_s / 3:  # enough is done to tell how fast this machine is
                planned_s = max(passed_s, passed_s * self._all_s / done_s)
            return max(0.0, planned_s - passed_s)


class CpuKernelBuilds:
    """Compiles the kernels that one process needs. num_threads: threads that run the models' kernels. num_processes: how many
    compilers may run at a time, MOST_COMPILERS at most. use: called with a dtype and a
    quantisation when their kernels are compiled (CpuOps.use). tell: called from other threads with news of the compilation."""

    def __init__(
        self, num_threads: int, num_processes: int, use: Callable[[str, str], None], tell: Callable[[KernelNews], None]
    ) -> None:
        self._parallel, self._num_processes = num_threads > 1, max(1, min(num_processes, MOST_COMPILERS))
        self._use, self._tell = use, tell
        self._lock = threading.Lock()
        self._known: set[_Kind] = set()
        self._queue: deque[tuple[_Kind, list[Unit]]] = deque()
        self._builder: threading.Thread | None = None
        self._idle: deque[subprocess.Popen[str]] = deque()  # compilers that have done what there was of one kind
        self.problems: dict[str, str] = {}  # kind -> why its kernels are not in use

    def need(self, dtype: str, quantize: str = "") -> None:
        """Asks for the kernels of a dtype. Returns once they are in use or are being compiled."""
        kind = _Kind(compiled.kernels_dtype(dtype), quantize)
        with self._lock:
            if kind in self._known:
                return
            self._known.add(kind)
            wanted = units(kind.dtype, self._parallel, quantize)
            missing = [unit for unit in wanted if not unit.load()]
            prepare_calls(wanted)
            if not missing:
                self._use(kind.dtype, quantize)
                return
            self._queue.append((kind, missing))
            if self._builder is None:
                self._builder = threading.Thread(target=self._build_all, name="kernels", daemon=True)
                self._builder.start()

    def wait(self) -> None:
        """Waits until nothing is being compiled."""
        while (builder := self._builder) is not None:
            builder.join()

    def _build_all(self) -> None:
        while True:
            with self._lock:
                if not self._queue:
                    self._builder = None
                    return
                kind, missing = self._queue.popleft()
            try:
                self._build(kind, missing)
            except Exception as error:
                log.exception("kernels for %s", kind)
                self._end_idle()
                self._give_up(kind, f"{type(error).__name__}: {error}", _Progress(missing, 1))

    def _build(self, kind: _Kind, missing: list[Unit]) -> None:
        num_processes = min(self._num_processes, len(missing))
        progress = _Progress(missing, num_processes)
        log.info(
            "kernels for %s are being compiled by %d processes, some %.0f s, once for this version and machine (%s); until then "
            "models are served by torch's operations, which are slower",
            kind,
            num_processes,
            progress.left_s,
            compiled.folder(),
        )
        left = deque(missing)
        threads = [
            threading.Thread(target=self._run_process, args=(kind, left, progress), name="compiler", daemon=True)
            for _ in range(num_processes)
        ]
        for thread in threads:
            thread.start()
        self._tell(KernelNews(self._told(kind, progress)))
        for thread in threads:
            thread.join(TELL_EVERY_S)
            while thread.is_alive():
                self._tell(KernelNews(self._told(kind, progress)))
                thread.join(TELL_EVERY_S)
        if not self._queue:
            self._end_idle()
        if problem := progress.problem or (progress.not_started if left else ""):
            self._give_up(kind, problem, progress)
            return
        # compiled in this process, what is lost would take memory from the models, and a crash of the compiler would end them
        if lost := [unit.name for unit in missing if not unit.load()]:
            others = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
            self._give_up(kind, f"{compiled.folder()} did not keep {lost[0]}{others}; is its disk full?", progress)
            return
        seconds = time.monotonic() - progress.since_s
        log.info("kernels for %s are compiled and in use: %.1f s", kind, seconds)
        self._tell(KernelNews(self._told(kind, progress, is_over=True), partial(self._use, kind.dtype, kind.quantize)))

    def _give_up(self, kind: _Kind, problem: str, progress: _Progress) -> None:
        log.error("kernels for %s are not in use, models of it stay slow: %s", kind, problem)
        self.problems[str(kind)] = problem
        self._tell(KernelNews(self._told(kind, progress, is_over=True)))

    def _told(self, kind: _Kind, progress: _Progress, is_over: bool = False) -> KernelsTold:
        problem = "; ".join(f"kernels for {of}: {what}" for of, what in self.problems.items())
        if is_over and not self._queue:
            return KernelsTold("", 0, 0, 0.0, problem)
        return KernelsTold(str(kind), progress.num_done, progress.num_units, round(progress.left_s, 1), problem)

    def _run_process(self, kind: _Kind, left: deque[Unit], progress: _Progress) -> None:
        """Has a process compile what is left, unit by unit; starts a new process whenever one has crashed. A process that is alive
        at the end is kept for the next kind, because starting one takes two seconds, unless it has grown large."""
        while left:
            try:
                process = self._kept() or _start(self._parallel)
            except OSError as error:  # another thread's process may compile everything
                progress.not_started = f"the compiler does not start: {error}"
                return
            while (unit := _next(left)) is not None:
                if not _compile_in(process, [kind.dtype, kind.quantize, unit.name]):
                    progress.done(unit)
                    progress.problem = f"the compiler ended with {_exit_of(process)} at {unit.name}"
                    _end(process)
                    break
                progress.done(unit)
            else:
                if _resident_bytes(process) <= KEPT_BYTES:
                    self._idle.append(process)
                else:
                    _end(process)

    def _kept(self) -> subprocess.Popen[str] | None:
        """Returns a process that was kept and is alive, or None."""
        while (process := _next(self._idle)) is not None:
            if process.poll() is None:
                return process
            _end(process)
        return None

    def _end_idle(self) -> None:
        while (process := _next(self._idle)) is not None:
            _end(process)


def _start(parallel: bool) -> subprocess.Popen[str]:
    command = [sys.executable, "-P", "-m", "engine.warm", compiled.folder(), "--unit-by-unit", "all" if parallel else "one"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    return subprocess.Popen(command, cwd="/", env=child_environment(), text=True, bufsize=1, **pipes)  # type: ignore[call-overload]


def _compile_in(process: subprocess.Popen[str], asked: list[str]) -> bool:
    """Has the process compile one unit. Returns whether it did; if not, the process has ended."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(json.dumps(asked) + "\n")
        process.stdin.flush()
    except BrokenPipeError:
        return False
    return process.stdout.readline() == "done\n"


def _next(left: deque[_T]) -> _T | None:
    try:
        return left.popleft()
    except IndexError:  # another thread may just have taken the last
        return None


def _end(process: subprocess.Popen[str]) -> None:
    """Closes the process's standard input, which makes it end, and waits for its end."""
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        with contextlib.suppress(BrokenPipeError):
            pipe.close()
    process.wait()


def _resident_bytes(process: subprocess.Popen[str]) -> int:
    try:
        with open(f"/proc/{process.pid}/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):  # it has just ended
        return sys.maxsize


def _exit_of(process: subprocess.Popen[str]) -> str:
    code = process.wait()
    return f"signal {-code}" if code < 0 else f"exit code {code}"


def compile_units(parallel: bool) -> None:
    """Runs in a compiler process: compiles the units named on standard input, answers each with a line, and exits when the input
    ends."""
    make_only_what_is_saved(module for name, module in list(sys.modules.items()) if name.startswith("engine.cpu.kernels."))
    asked: SimpleQueue[list[str]] = SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            asked.put(json.loads(line))
        os._exit(0)  # even in the middle of a unit: its result is no longer wanted

    threading.Thread(target=read, daemon=True).start()
    while True:
        dtype, quantize, name = asked.get()
        next(unit for unit in units(dtype, parallel, quantize) if unit.name == name).compile()
        print("done", flush=True)
