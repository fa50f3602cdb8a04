"""Compiles CPU kernels in separate processes, while the engine serves its models with torch's operations. The memory of the
processes is freed when they end.

An engine asks for the sets of kernels that models need (`need`). Sets in the cache folder are used at once. The others are
compiled, unit by unit (a unit is a kernel in its variants for one and for several threads), by processes that end when all are
compiled: python -P -m engine.warm --unit-by-unit. Each set comes into use when its last unit is compiled.

A set is given up, so that its operations go on with torch, in three cases: a compiler crashes at one of its units; a unit is not
compiled within UNIT_LIMIT_S, and its compiler is killed; or the cache folder did not keep a compiled kernel. The engine goes on
running, and does not try such a unit again.

Kernels that only sampling calls are compiled last, while the engine is idle, or at once when a step calls them (`hurry`). They may
never be needed, because steps that choose the most likely token do not call them, and a compiler would take a core, or half of the
memory's bandwidth, from such steps."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import subprocess
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from queue import Empty, SimpleQueue
from typing import TypeVar

from engine.contracts.loads import KernelNews
from engine.cpu.kernel_units import Unit, prepare_calls, units
from engine.host import compiled
from engine.host.child_process import COMPILER_BYTES, MOST_COMPILERS, child_environment
from engine.host.saved_code import make_only_what_is_saved
from engine.protocol import KernelsTold
from loader.configs.kernel_sets import SAMPLING, KernelSet
from loader.threads import Thread

log = logging.getLogger("engine")
_T = TypeVar("_T")

TELL_EVERY_S, MEASURE_EVERY_S = 1.0, 0.5
IDLE_SHARE = 0.1  # an engine that uses less of a core than this is idle
START_S = 1.0  # a process needs this long for its imports before it compiles
UNIT_LIMIT_S = 300.0  # 25 times what the longest unit takes, for machines that are slow, emulated or swap
END_S = 5.0  # how long the end of a compiler is waited for; one that waits in the kernel for a file may not end at all
KEPT_BYTES = COMPILER_BYTES * 3 // 4  # a process with more memory than this compiles nothing more


class _Build:
    """The compilation of some sets of kernels by compiler processes: the units (kernels with their variants) that are still to be
    compiled, and an estimate of how long that will take. missing: set -> its units that were not in the cache folder."""

    def __init__(self, missing: dict[KernelSet, list[Unit]]) -> None:
        self.missing = missing
        self.left = {kernel_set: set(of_set) for kernel_set, of_set in missing.items()}  # set -> units still to be compiled
        self.problems: dict[KernelSet, str] = {}  # set -> how the process that compiled one of its units ended
        self.not_started = ""  # why no process started
        owners: dict[Unit, KernelSet] = {}
        for kernel_set, of_set in missing.items():
            for unit in of_set:
                owners.setdefault(unit, kernel_set)
        dtypes = list(dict.fromkeys(kernel_set.dtype for kernel_set in missing))

        def turn(one: tuple[Unit, KernelSet]) -> tuple[bool, int, float]:
            unit, kernel_set = one
            return kernel_set.name == SAMPLING, dtypes.index(kernel_set.dtype), -unit.seconds

        self.queue = deque(sorted(owners.items(), key=turn))
        self.num_units, self.num_done, self.num_processes = len(owners), 0, 1
        self.num_running = 0  # threads that have compilers
        self.num_compiling = 0  # units that are being compiled
        self.since_s = time.monotonic()
        self.postponed_s = 0.0  # how long nothing was compiled because the engine computed
        self._all_s = sum(unit.seconds for unit in owners)
        self._longest_s = max(unit.seconds for unit in owners)
        self._done_s = 0.0

    def begin(self, num_processes: int) -> None:
        self.num_processes = self.num_running = min(num_processes, self.num_units)
        self.since_s = time.monotonic()

    def done(self, unit: Unit, problem: str) -> list[KernelSet]:
        """Records that the compilation of a unit (a kernel in its variants) has ended, and returns the sets of kernels of which it
        was the last unit. problem: why the compilation failed; "": it succeeded."""
        self.num_done += 1
        self._done_s += unit.seconds
        of_unit = [kernel_set for kernel_set, left in self.left.items() if unit in left]
        for kernel_set in of_unit:
            self.left[kernel_set].discard(unit)
            if problem:
                self.problems.setdefault(kernel_set, problem)
        return [kernel_set for kernel_set in of_unit if not self.left[kernel_set]]

    @property
    def title(self) -> str:
        """The names of the sets that are still being compiled, for messages."""
        titles = list(dict.fromkeys(kernel_set.title for kernel_set in self.left))
        return " and ".join(part for part in (", ".join(titles[:-1]), *titles[-1:]) if part)

    @property
    def left_s(self) -> float:
        """The estimated seconds of compiling that remain until all units are compiled."""
        passed_s = time.monotonic() - self.since_s - self.postponed_s
        planned_s = START_S + max(self._longest_s, self._all_s / self.num_processes)
        if self._done_s >= self._all_s / 3:  # enough is done to tell how fast this machine is
            planned_s = max(passed_s, passed_s * self._all_s / self._done_s)
        return max(0.0, planned_s - passed_s)


class _Measure:
    """Measures how much processor time this process uses."""

    def __init__(self) -> None:
        self._at_s, self._computed_s = time.monotonic(), time.process_time()

    def share(self) -> float | None:
        """Returns the processor time that this process has used since the last result, divided by the time that has passed since
        then: 1.0 stands for one core. Returns None if the last result is less than MEASURE_EVERY_S seconds old."""
        at_s, computed_s = time.monotonic(), time.process_time()
        if (passed_s := at_s - self._at_s) < MEASURE_EVERY_S:
            return None
        share = (computed_s - self._computed_s) / passed_s
        self._at_s, self._computed_s = at_s, computed_s
        return share


class CpuKernelBuilds:
    """Compiles the kernels that this process needs, in other processes.
    num_threads: threads that run the models' kernels; if more than one, the kernels' variants for several threads are compiled,
    too.
    num_processes: the most compilers that run at a time; a number above MOST_COMPILERS counts as MOST_COMPILERS.
    use: called with each set of kernels once all its kernels can be loaded.
    give_up: called with each set that cannot be compiled.
    tell: called from other threads with news of the compilation: a message for the daemon, and what the engine must call between
    two steps to put new kernels into use."""

    def __init__(
        self,
        num_threads: int,
        num_processes: int,
        use: Callable[[KernelSet], None],
        give_up: Callable[[KernelSet], None],
        tell: Callable[[KernelNews], None],
    ) -> None:
        self._parallel, self._num_processes = num_threads > 1, max(1, min(num_processes, MOST_COMPILERS))
        self._use, self._give_up, self._tell = use, give_up, tell
        self._lock = threading.Lock()
        self._known: set[KernelSet] = set()
        self._builds: deque[_Build] = deque()
        self._builder: Thread | None = None
        self._idle: deque[subprocess.Popen[str]] = deque()  # compilers that have finished a build
        self._hurried: set[KernelSet] = set()  # sets for sampling that are compiled even while the engine computes
        self._changed = threading.Condition(self._lock)  # notified when something may be compiled that had to wait
        self._running: _Build | None = None
        self._moved_s = 0.0  # when the last unit was compiled, or sets were asked for while none was being compiled
        self._is_idle = False  # whether this process computed next to nothing when that was last measured
        self.problems: dict[str, str] = {}  # set of kernels -> why it is not in use

    def knows(self, kernel_set: KernelSet) -> bool:
        """Returns whether this set of kernels has been asked for before, by a call of `need`."""
        return kernel_set in self._known

    def need(self, sets: Iterable[KernelSet]) -> None:
        """Asks for sets of kernels, and returns without waiting for compilers. Sets that are complete in the cache folder are in
        use when this returns. The others are compiled by other processes, after all sets that were asked for earlier.

        They are compiled in this order: first the sets that steps call, then those that only sampling calls; among these by dtype,
        in the order of `sets`; then the unit that takes longest first. Sets that only sampling calls are compiled while the engine
        is idle, or after a call of `hurry`."""
        with self._lock:
            new = [kernel_set for kernel_set in dict.fromkeys(sets) if kernel_set not in self._known]
            self._known.update(new)
            wanted = {kernel_set: units(kernel_set, self._parallel) for kernel_set in new}
            missing = {kernel_set: [unit for unit in of_set if not unit.load()] for kernel_set, of_set in wanted.items()}
            prepare_calls([unit for of_set in wanted.values() for unit in of_set])
            for kernel_set in new:
                if not missing[kernel_set]:
                    self._use(kernel_set)
            if any(missing.values()):
                if self._running is None or not self._running.num_compiling:
                    self._moved_s = time.monotonic()
                if self._builder is not None:  # the new sets wait for these
                    self._hurry(self._known.difference(new))
                self._builds.append(_Build({kernel_set: of_set for kernel_set, of_set in missing.items() if of_set}))
            if self._builds and self._builder is None:  # None also if no thread could be started before
                builder = Thread(target=self._build_all, name="kernels")
                builder.start()
                self._builder = builder

    def hurry(self, sets: Iterable[KernelSet]) -> None:
        """Lets these sets of kernels be compiled even while the engine computes. It changes something only for sets that only
        sampling calls; they would otherwise be compiled while the engine is idle."""
        with self._lock:
            self._hurry(sets)

    def _hurry(self, sets: Iterable[KernelSet]) -> None:
        self._hurried.update(sets)
        self._changed.notify_all()

    def _may_wait(self, kernel_set: KernelSet) -> bool:
        """Returns whether a set of kernels is compiled only while the engine is idle: it is a set for sampling, and `hurry` was not
        called for it."""
        return kernel_set.name == SAMPLING and kernel_set not in self._hurried

    @property
    def stall(self) -> str:
        """A message if waiting for the compilers is useless, because they have compiled nothing for UNIT_LIMIT_S seconds; "" if
        they make progress or have nothing to compile."""
        is_still = self._running is not None and time.monotonic() - self._moved_s > UNIT_LIMIT_S
        return f"no kernel was compiled for {UNIT_LIMIT_S:g} s" if is_still else ""

    @property
    def takes_cores(self) -> bool:
        """Returns whether kernels are compiled even while the engine computes, so that steps should leave cores to the
        compilers."""
        running = self._running
        only_waits = running is not None and all(self._may_wait(one) for one in tuple(running.left))
        return self._builder is not None and not only_waits

    def wait(self) -> None:
        """Waits until all sets that were asked for are compiled or have failed, including those that only sampling calls."""
        self.hurry(self._known)
        while (builder := self._builder) is not None:
            builder.join()

    def _build_all(self) -> None:
        while True:
            with self._lock:
                if not self._builds:
                    self._builder = None
                    return
                build = self._builds.popleft()
            problem = ""
            try:
                self._running = build
                self._build(build)
            except Exception as error:
                log.exception("kernels for %s", build.title)
                problem = f"{type(error).__name__}: {error}"
            finally:
                self._running = None
            if not self._builds:
                self._end_idle()
            for kernel_set in list(build.left):
                build.problems.setdefault(kernel_set, problem or build.not_started)
                self._end_set(build, kernel_set)

    def _build(self, build: _Build) -> None:
        build.begin(self._num_processes)
        log.info(
            "kernels for %s are being compiled by %d processes, some %.0f s, once for this version and machine (%s); until then "
            "models are served by torch's operations, which are slower",
            build.title,
            build.num_processes,
            build.left_s,
            compiled.folder(),
        )
        ended: SimpleQueue[tuple[Unit, str] | None] = SimpleQueue()  # units with their problems; None: a thread has ended
        for _ in range(build.num_processes):
            Thread(target=self._run_thread, args=(build, ended), name="compiler").start()
        self._tell(KernelNews(self._told(build)))
        told_s = time.monotonic()
        measure = _Measure()
        while build.num_running:
            try:
                found = [ended.get(timeout=MEASURE_EVERY_S)]
            except Empty:
                found = []
            if (computes := measure.share()) is not None:
                with self._lock:
                    self._is_idle = computes < IDLE_SHARE
                    self._changed.notify_all()
                build.postponed_s += MEASURE_EVERY_S * self._is_postponed(build)
            for one in found:
                if one is None:
                    build.num_running -= 1
                else:
                    if not one[1]:
                        self._moved_s = time.monotonic()
                    for kernel_set in build.done(*one):
                        self._end_set(build, kernel_set)
            if not found and time.monotonic() - told_s >= TELL_EVERY_S:
                self._tell(KernelNews(self._told(build)))
                told_s = time.monotonic()

    def _end_set(self, build: _Build, kernel_set: KernelSet) -> None:
        """Ends the compilation of one set: reports it to the daemon, and lets the engine bring the set into use between two steps,
        or give it up if it was not compiled."""
        del build.left[kernel_set]
        problem = build.problems.get(kernel_set, "")
        try:  # a lost kernel is not compiled here: that would take the models' memory, and a compiler's crash would end them
            if not problem and (lost := [unit.name for unit in build.missing[kernel_set] if not unit.load()]):
                others = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
                problem = f"{compiled.folder()} did not keep {lost[0]}{others}; is its disk full?"
        except Exception as error:
            log.exception("kernels for %s", kernel_set)
            problem = f"{type(error).__name__}: {error}"
        if problem:
            log.error("kernels for %s are not in use, models that need them stay slow: %s", kernel_set, problem)
            self.problems[str(kernel_set)] = problem
            self._tell(KernelNews(self._told(build), partial(self._give_up, kernel_set)))
        else:
            log.info("kernels for %s are compiled and in use: %.1f s", kernel_set, time.monotonic() - build.since_s)
            self._tell(KernelNews(self._told(build), partial(self._use, kernel_set)))

    def _told(self, build: _Build) -> KernelsTold:
        problem = "; ".join(f"kernels for {of}: {what}" for of, what in self.problems.items())
        if (title := build.title) or self._builds:
            progress = build.num_done, build.num_units, round(build.left_s, 1)
            postponed = bool(title) and self._is_postponed(build)
            return KernelsTold(title or self._builds[0].title, *progress, problem, postponed=postponed)
        return KernelsTold("", 0, 0, 0.0, problem)

    def _run_thread(self, build: _Build, ended: SimpleQueue[tuple[Unit, str] | None]) -> None:
        try:
            self._run_process(build, ended)
        finally:
            ended.put(None)

    def _run_process(self, build: _Build, ended: SimpleQueue[tuple[Unit, str] | None]) -> None:
        """Compiles the units (kernels in their variants) in build.queue, one by one, in a compiler process. Puts each unit into
        `ended`, with the problem that kept it from being compiled ("": none). Starts a new process if the last one has crashed, or
        was ended because all units that are left must wait until the engine is idle. A process that is alive at the end is kept for
        the next build, because starting one takes a second; if its memory has grown large, it is ended."""
        process = None
        while build.queue:
            if (found := self._take(build)) is None:
                if process is not None:
                    _end(process)  # its memory is of no use for as long as the engine computes
                    process = None
                with self._lock:
                    self._changed.wait_for(lambda: not build.queue or self._first(build) is not None)
                continue
            unit, kernel_set = found
            try:
                process = process or self._kept() or _start(self._parallel)
            except OSError as error:  # another thread's process may compile everything
                build.not_started = f"the compiler does not start: {error}"
                self._end_unit(build, found)
                return
            problem = _compile_in(process, [*kernel_set, unit.name])
            ended.put((unit, problem))
            if problem:
                _end(process)
                process = None
            self._end_unit(build)
        if process is not None:
            if _resident_bytes(process) <= KEPT_BYTES:
                self._idle.append(process)
            else:
                _end(process)

    def _first(self, build: _Build) -> tuple[Unit, KernelSet] | None:
        """Returns the first unit (a kernel in its variants) in a build's queue that may be compiled now, with the set that it
        belongs to. Returns None if the queue is empty, or if all its units must wait until the engine is idle."""
        return next((one for one in build.queue if self._is_idle or not self._may_wait(one[1])), None)

    def _take(self, build: _Build) -> tuple[Unit, KernelSet] | None:
        """Removes from a build's queue the unit that `_first` returns, and returns it with the set that it belongs to; None if no
        unit may be compiled now."""
        with self._lock:
            if (found := self._first(build)) is not None:
                build.queue.remove(found)
                build.num_compiling += 1
            return found

    def _end_unit(self, build: _Build, untried: tuple[Unit, KernelSet] | None = None) -> None:
        """Records that a unit (a kernel in its variants) is not being compiled any more. untried: the unit to put back into the
        queue, because no compiler could be started; None: there is none."""
        with self._lock:
            build.num_compiling -= 1
            if untried is not None:
                build.queue.appendleft(untried)
            self._changed.notify_all()

    def _is_postponed(self, build: _Build) -> bool:
        """Returns whether a build compiles nothing for now, because all units that are left must wait until the engine is idle."""
        with self._lock:
            return bool(build.queue) and build.num_compiling == 0 and self._first(build) is None

    def _kept(self) -> subprocess.Popen[str] | None:
        """Returns a compiler process that was kept from an earlier build and is alive, or None if there is none."""
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


def _compile_in(process: subprocess.Popen[str], asked: list[str]) -> str:
    """Has a compiler process compile one unit (a kernel in its variants). asked: dtype and name of the set of kernels, and the
    unit's name. Returns "" if the unit was compiled. Otherwise returns a message that says why not; the process has then ended or
    was killed."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(json.dumps(asked) + "\n")
        process.stdin.flush()
    except BrokenPipeError:
        return f"the compiler ended with {_exit_of(process)} at {asked[-1]}"
    poller = select.poll()
    poller.register(process.stdout, select.POLLIN)
    if not poller.poll(UNIT_LIMIT_S * 1e3):
        process.kill()
        return f"the compiler was not done with {asked[-1]} within {UNIT_LIMIT_S:g} s"
    if process.stdout.readline() != "done\n":
        return f"the compiler ended with {_exit_of(process)} at {asked[-1]}"
    return ""


def _next(left: deque[_T]) -> _T | None:
    try:
        return left.popleft()
    except IndexError:  # another thread may just have taken the last process
        return None


def _end(process: subprocess.Popen[str]) -> None:
    """Ends a compiler process: closes its pipes, waits up to END_S seconds for its end, and kills it if it is still alive."""
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        with contextlib.suppress(BrokenPipeError):
            pipe.close()
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        log.warning("a compiler (pid %d) does not end; it is killed", process.pid)
        process.kill()


def _resident_bytes(process: subprocess.Popen[str]) -> int:
    try:
        with open(f"/proc/{process.pid}/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):  # it has just ended
        return sys.maxsize


def _exit_of(process: subprocess.Popen[str]) -> str:
    try:
        code = process.wait(END_S)
    except subprocess.TimeoutExpired:
        return f"no exit code within {END_S:g} s"
    return f"signal {-code}" if code < 0 else f"exit code {code}"


def compile_units(parallel: bool) -> None:
    """The main loop of a compiler process: compiles each unit named in a line of standard input, answers with the line "done", and
    exits when the input ends. parallel: whether to compile the kernels' variants for several threads, too."""
    make_only_what_is_saved(module for name, module in list(sys.modules.items()) if name.startswith("engine.cpu.kernels."))
    asked: SimpleQueue[list[str]] = SimpleQueue()

    def read() -> None:
        code = 1
        try:
            for line in sys.stdin:
                asked.put(json.loads(line))
            code = 0
        except Exception:  # who has asked waits for an answer without limit
            traceback.print_exc()
        finally:
            os._exit(code)  # even in the middle of a unit: its result is no longer wanted

    Thread(target=read).start()
    while True:
        *kernel_set, name = asked.get()
        next(unit for unit in units(KernelSet(*kernel_set), parallel) if unit.name == name).compile()
        print("done", flush=True)
