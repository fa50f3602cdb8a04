"""Kernels compiled by other processes: when they come into use, what is reported meanwhile, and what a crash of the compiler
leaves.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest

from engine.contracts.loads import KernelNews
from engine.host import compiled
from loader.configs.kernel_sets import OF_DECODERS, KernelSet
from tests.engine.cpu_ops import SETS
from tests.kernel_cache import CACHE_DIR

compiled.keep_in(CACHE_DIR)  # before a kernel is imported

from engine.cpu import kernel_builds, kernel_units  # noqa: E402
from engine.cpu.kernel_builds import CpuKernelBuilds  # noqa: E402

STEPS, ATTENTION = KernelSet("bfloat16", ""), KernelSet("bfloat16", "attention")
SAMPLING, FLOAT32 = KernelSet("bfloat16", "sampling"), KernelSet("float32", "")
# stands in for a process of `_start`: writes the names it is asked for to a file, crashes at one name, and stands still at another
PROCESS = """
import json, os, signal, sys
for line in sys.stdin:
    name = json.loads(line)[-1]
    with open(sys.argv[1], "a") as file:
        print(name, file=file)
    if name == sys.argv[2]:
        os.abort()
    if name == sys.argv[3]:
        signal.pause()
    print("done", flush=True)
"""


@dataclass(eq=False)
class Unit:
    """A unit of kernels as CpuKernelBuilds sees it. keeps: once other processes have compiled it, it can be loaded."""

    name: str
    seconds: float = 1.0
    is_there: bool = False
    keeps: bool = True
    num_loads: int = 0

    def load(self) -> bool:
        self.num_loads += 1
        return self.is_there or (self.keeps and self.num_loads > 1)


@dataclass
class Machine:
    builds: CpuKernelBuilds
    asked_for: Path
    news: list[KernelNews] = field(default_factory=list)
    used: list[KernelSet] = field(default_factory=list)
    given_up: list[KernelSet] = field(default_factory=list)
    num_processes: int = 0

    @property
    def asked(self) -> list[str]:
        return self.asked_for.read_text().split() if self.asked_for.exists() else []


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., Machine]]:
    all_made: list[Machine] = []

    def make(
        units: list[Unit] | dict[KernelSet, list[Unit]],
        crashes_at: str = "",
        command: str = sys.executable,
        processes: int = 2,
        stands_at: str = "",
        together: bool = False,
    ) -> Machine:
        """together: no process compiles before all of them are started."""
        news: list[KernelNews] = []
        used: list[KernelSet] = []
        given_up: list[KernelSet] = []
        builds = CpuKernelBuilds(2, processes, used.append, given_up.append, news.append)
        made = Machine(builds, tmp_path / "asked", news, used, given_up)
        all_made.append(made)

        counts, all_started = threading.Lock(), threading.Barrier(processes if together else 1)

        def start(parallel: bool) -> subprocess.Popen[str]:
            assert parallel
            with counts:
                made.num_processes += 1
            all_started.wait(60)
            arguments = [command, "-c", PROCESS, str(made.asked_for), crashes_at, stands_at]
            return subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)

        monkeypatch.setattr(kernel_builds, "_start", start)
        of_set = units if isinstance(units, dict) else None
        monkeypatch.setattr(kernel_builds, "units", lambda kernel_set, parallel: units if of_set is None else of_set[kernel_set])
        monkeypatch.setattr(kernel_builds, "prepare_calls", lambda units: None)
        return made

    yield make
    for made in all_made:
        made.builds.wait()


def test_what_is_there_is_in_use_at_once(machine):
    one = machine([Unit("a", is_there=True), Unit("b", is_there=True)])
    assert not one.builds.knows(STEPS)
    one.builds.need([STEPS])
    assert (one.used, one.num_processes, one.news) == ([STEPS], 0, [])
    assert one.builds.knows(STEPS)
    one.builds.need([STEPS, STEPS])
    assert len(one.used) == 1


def test_what_is_missing_is_compiled_elsewhere_and_used_when_it_is_said(machine):
    units = [Unit("a", is_there=True), *(Unit(name) for name in "bcdefg")]
    one = machine(units, together=True)
    int8 = KernelSet("float32", "int8")
    one.builds.need([int8])
    one.builds.wait()
    assert sorted(one.asked) == list("bcdefg")
    assert one.num_processes == 2
    assert one.used == []
    told = one.news[-1].told
    assert (told.kind, told.num_units, told.problem) == ("", 0, "")
    first = one.news[0].told
    assert (first.kind, first.num_units) == ("float32 with int8 weights", 6)
    assert 0 < first.left_s < 60
    apply_last(one)
    assert one.used == [int8]
    assert one.builds.problems == {}


def test_steps_come_before_sampling_and_the_longest_first_and_each_set_is_used_when_it_is_there(machine):
    """A unit that two sets share is compiled once, and both come into use after it."""
    shared = Unit("s", 2.0)
    sets = {
        SAMPLING: [Unit("d", 9.0)],
        STEPS: [Unit("a", 1.0), shared],
        ATTENTION: [Unit("b", 3.0)],
        KernelSet("float32", "sampling"): [Unit("e", 10.0)],
        KernelSet("float32", ""): [Unit("c", 8.0), shared],
    }
    one = machine(sets, processes=1)
    one.builds.need(sets)
    one.builds.wait()
    assert one.asked == list("bsacde")
    for news in one.news:
        if news.apply is not None:
            news.apply()
    assert one.used == [ATTENTION, STEPS, KernelSet("float32", ""), SAMPLING, KernelSet("float32", "sampling")]
    kinds = list(dict.fromkeys(news.told.kind for news in one.news))
    assert kinds == ["sampling, bfloat16 and float32", "sampling and float32", "sampling", ""]
    assert [news.told.kind for news in one.news].count("") == 1, "its end is told once"


class Engine:
    """Stands in for the processor time of an engine: it computes all the time while `computes` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.computes = True
        self._at_s, self._computed_s = time.monotonic(), 0.0
        monkeypatch.setattr(kernel_builds, "MEASURE_EVERY_S", 0.02)
        monkeypatch.setattr(kernel_builds, "TELL_EVERY_S", 0.05)
        monkeypatch.setattr(time, "process_time", self._process_time)

    def _process_time(self) -> float:
        now_s = time.monotonic()
        self._computed_s += (now_s - self._at_s) * self.computes
        self._at_s = now_s
        return self._computed_s


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    return Engine(monkeypatch)


def until(is_so: Callable[[], bool]) -> None:
    for _ in range(2000):
        if is_so():
            return
        time.sleep(0.01)
    raise AssertionError("not within 20 s")


def apply_last(one: Machine) -> None:
    """Does between two steps what the last news asks for. Progress may be told behind it, while a compiler's thread still ends."""
    next(news.apply for news in reversed(one.news) if news.apply is not None)()


def until_postponed(one: Machine) -> None:
    while not (one.news and one.news[-1].told.postponed):
        time.sleep(0.01)


def test_what_only_sampling_calls_is_not_compiled_while_the_engine_computes(machine, engine):
    """The compiler ends meanwhile. That steps need not leave it a core is known, and that nobody waits for these kernels is
    told."""
    one = machine({STEPS: [Unit("a")], SAMPLING: [Unit("b"), Unit("c")]}, processes=2)
    assert not one.builds.takes_cores
    one.builds.need([STEPS, SAMPLING])
    assert one.builds.takes_cores
    until_postponed(one)
    assert one.asked == ["a"]
    assert not one.builds.takes_cores
    told = one.news[-1].told
    assert (told.kind, told.num_done, told.num_units) == ("sampling", 1, 3)
    left_s = told.left_s
    time.sleep(0.3)
    assert one.asked == ["a"]
    assert one.news[-1].told.left_s > left_s - 0.2, "the wait counts as compiling"
    for news in one.news:
        if news.apply is not None:
            news.apply()
    assert one.used == [STEPS]
    engine.computes = False
    one.builds._builder.join()
    assert sorted(one.asked) == list("abc")
    apply_last(one)
    assert (one.used, one.builds.problems) == ([STEPS, SAMPLING], {})
    assert not one.builds.takes_cores


def test_a_step_that_samples_has_what_it_calls_compiled_at_once(machine, engine):
    """Rows whose logits are edited call another dtype's, which goes on waiting."""
    edited = KernelSet("float32", "sampling")
    one = machine({STEPS: [Unit("a")], edited: [Unit("e")], SAMPLING: [Unit("b"), Unit("c")]}, processes=2)
    one.builds.need([STEPS, edited, SAMPLING])
    until_postponed(one)
    one.builds.hurry([SAMPLING])
    assert one.builds.takes_cores
    while len(one.asked) < 3 or one.builds.takes_cores:
        time.sleep(0.01)
    until_postponed(one)
    assert (sorted(one.asked), one.news[-1].told.num_done) == (list("abc"), 3)
    one.builds.hurry([edited])
    one.builds._builder.join()
    assert sorted(one.asked) == list("abce")


def test_what_is_needed_meanwhile_does_not_wait_for_an_idle_engine(machine, engine):
    one = machine({SAMPLING: [Unit("b")], FLOAT32: [Unit("c")]}, processes=1)
    one.builds.need([SAMPLING])
    until_postponed(one)
    one.builds.need([FLOAT32])
    one.builds._builder.join()
    assert one.asked == ["b", "c"]
    assert one.builds.problems == {}


def test_a_crash_while_the_engine_computes_is_told_and_the_rest_is_compiled_later(machine, engine):
    one = machine({STEPS: [Unit("a"), Unit("b")], SAMPLING: [Unit("c")]}, crashes_at="a", processes=1)
    one.builds.need([STEPS, SAMPLING])
    until_postponed(one)
    assert one.asked == ["a", "b"]
    assert "signal 6 at a" in one.news[-1].told.problem
    engine.computes = False
    one.builds._builder.join()
    assert one.asked == ["a", "b", "c"]


def test_a_compiler_that_crashes_is_started_again_for_the_rest_and_its_units_set_is_left(machine, caplog):
    one = machine({STEPS: [Unit(name) for name in "abdef"], SAMPLING: [Unit("c"), Unit("g")]}, crashes_at="c")
    one.builds.need([STEPS, SAMPLING])
    one.builds.wait()
    assert sorted(one.asked) == list("abcdefg")
    assert one.num_processes in (2, 3)  # no third one is needed if the crash comes last
    for news in one.news:
        if news.apply is not None:
            news.apply()
    assert (one.used, one.given_up) == ([STEPS], [SAMPLING])
    assert one.news[-1].told.kind == ""
    assert one.news[-1].told.problem == "kernels for sampling in bfloat16: the compiler ended with signal 6 at c"
    assert "kernels for sampling in bfloat16 are not in use" in caplog.text
    one.builds.need([STEPS, SAMPLING])
    one.builds.wait()
    assert len(one.asked) == 7


def test_a_compiler_that_stands_still_is_killed_and_its_units_set_is_left(machine, monkeypatch):
    units = {STEPS: [Unit("c", seconds=9.0)], ATTENTION: [Unit("a"), Unit("b")]}
    one = machine(units, processes=1, stands_at="c")
    start, limits_s, processes = kernel_builds._start, iter([0.2, 60.0]), []

    def start_next(parallel: bool) -> subprocess.Popen[str]:
        monkeypatch.setattr(kernel_builds, "UNIT_LIMIT_S", next(limits_s))  # the first process has the first unit alone
        processes.append(start(parallel))
        return processes[-1]

    monkeypatch.setattr(kernel_builds, "_start", start_next)
    one.builds.need([STEPS, ATTENTION])
    one.builds._builder.join(20)
    processes[0].kill()
    assert one.news[-1].told.problem == "kernels for bfloat16: the compiler was not done with c within 0.2 s"
    for news in one.news:
        if news.apply is not None:
            news.apply()
    assert (one.used, one.given_up) == ([ATTENTION], [STEPS])
    assert one.num_processes == 2


def test_compilers_that_all_stand_still_are_told_of(machine, monkeypatch):
    one = machine([Unit("c"), Unit("d")], processes=1, stands_at="c")
    start, processes = kernel_builds._start, []
    monkeypatch.setattr(kernel_builds, "_start", lambda parallel: processes.append(start(parallel)) or processes[-1])
    one.builds.need([STEPS])
    until(lambda: one.asked == ["c"])
    assert one.builds.stall == ""
    one.builds._moved_s -= kernel_builds.UNIT_LIMIT_S
    assert one.builds.stall == "no kernel was compiled for 300 s"
    one.builds.need([SAMPLING])
    assert one.builds.stall, "a further load is no sign of life"
    processes[0].kill()
    one.builds._builder.join()
    assert one.builds.stall == ""
    assert one.asked == list("cd")


def test_a_compiler_that_does_not_end_keeps_nobody_waiting(monkeypatch, caplog):
    """One that waits in the kernel, for a file system that does not answer, does not end on SIGKILL either."""
    calls = []

    def wait(limit_s: float) -> int:
        calls.append("wait")
        raise subprocess.TimeoutExpired("compiler", limit_s)

    pipe = SimpleNamespace(close=lambda: None)
    process = SimpleNamespace(stdin=pipe, stdout=pipe, pid=7, wait=wait, kill=lambda: calls.append("kill"))
    kernel_builds._end(process)
    assert calls == ["wait", "kill"]
    assert "(pid 7) does not end" in caplog.text


def test_without_processes_nothing_is_compiled_and_it_is_told(machine):
    one = machine([Unit("a")], command="/nonexistent/python")
    one.builds.need([STEPS])
    one.builds.wait()
    apply_last(one)
    assert (one.used, one.given_up) == ([], [STEPS])
    assert "No such file" in one.news[-1].told.problem


def test_one_process_does_it_all_where_another_does_not_start(machine, monkeypatch):
    one = machine([Unit(name) for name in "abcd"])
    start, num_asked = kernel_builds._start, iter(range(9))

    def start_once(parallel: bool) -> subprocess.Popen[str]:
        if next(num_asked):
            raise OSError("no more processes")
        return start(parallel)

    monkeypatch.setattr(kernel_builds, "_start", start_once)
    one.builds.need([STEPS])
    one.builds.wait()
    assert sorted(one.asked) == list("abcd")
    apply_last(one)
    assert one.used == [STEPS]
    assert one.builds.problems == {}


@pytest.mark.parametrize(("lost", "told"), [("a", "a"), ("bc", "b and 1 more"), ("abcd", "a and 3 more")])
def test_what_a_full_cache_folder_does_not_keep_is_told_and_not_used(machine, caplog, lost, told):
    one = machine([Unit(name, keeps=name not in lost) for name in "abcd"])
    one.builds.need([STEPS])
    one.builds.wait()
    problem = f"kernels for bfloat16: {compiled.folder()} did not keep {told}; is its disk full?"
    assert (one.news[-1].told.kind, one.news[-1].told.problem) == ("", problem)
    apply_last(one)
    assert (one.used, one.given_up) == ([], [STEPS])
    one.builds.need([STEPS])
    one.builds.wait()
    assert caplog.text.count("kernels for bfloat16 are not in use, models that need them stay slow") == 1
    assert len(one.asked) == 4


def test_what_is_asked_for_later_is_compiled_afterwards_by_the_same_processes(machine, monkeypatch):
    one = machine({STEPS: [Unit("a"), Unit("b")], FLOAT32: [Unit("c"), Unit("d")]}, together=True)
    both_are_needed, run = threading.Event(), one.builds._run_process
    monkeypatch.setattr(one.builds, "_run_process", lambda *args: (both_are_needed.wait(), run(*args)))
    one.builds.need([STEPS])
    one.builds.need([FLOAT32])
    both_are_needed.set()
    one.builds.wait()
    assert one.num_processes == 2
    kinds = list(dict.fromkeys(news.told.kind for news in one.news))
    assert kinds == ["bfloat16", "float32", ""]
    for news in one.news:
        if news.apply is not None:
            news.apply()
    assert one.used == [STEPS, FLOAT32]


def test_an_exception_is_told(machine, monkeypatch):
    one = machine([Unit("a")])
    may_run, run = threading.Event(), one.builds._run_process
    monkeypatch.setattr(one.builds, "_run_process", lambda *args: (may_run.wait(), run(*args)))
    one.builds.need([STEPS])
    monkeypatch.setattr(Unit, "load", lambda self: 1 / 0)
    may_run.set()
    one.builds.wait()
    assert "ZeroDivisionError" in one.news[-1].told.problem


def test_an_exception_of_the_builder_ends_all_sets(machine, monkeypatch):
    one = machine({STEPS: [Unit("a", keeps=False)], FLOAT32: [Unit("b", keeps=False)]})
    monkeypatch.setattr(one.builds, "_build", lambda build: 1 / 0)
    one.builds.need([STEPS, FLOAT32])
    one.builds.wait()
    for news in one.news:
        news.apply()
    assert one.given_up == [STEPS, FLOAT32]
    assert one.news[-1].told.problem.count("ZeroDivisionError") == 2


def test_a_process_compiles_what_it_is_asked_for_and_ends_with_its_input():
    script = (
        "import sys; from engine.cpu import kernel_builds as k\n"
        "class U:\n"
        "    def __init__(self, name): self.name = name\n"
        "    def compile(self): print('compiling', self.name, file=sys.stderr)\n"
        "k.units = lambda *asked: [U(name) for name in 'abc']\n"
        "k.compile_units(True)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script], stdin=-1, stdout=-1, stderr=-1, text=True)
    for name in "ca":
        assert not kernel_builds._compile_in(process, ["bfloat16", "", name])
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0
    assert errors.split() == ["compiling", "c", "compiling", "a"]


def test_a_process_that_cannot_read_what_it_is_asked_for_ends():
    """The engine waits for its answer without limit."""
    script = "from engine.cpu import kernel_builds as k; k.compile_units(True)"
    process = subprocess.Popen([sys.executable, "-c", script], stdin=-1, stdout=-1, stderr=-1, text=True)
    assert process.stdin is not None
    process.stdin.write("no JSON\n")
    process.stdin.flush()
    try:
        assert process.wait(timeout=60) == 1
    finally:
        process.kill()
        _, errors = process.communicate()
    assert "JSONDecodeError" in errors


# ---- real kernels, in processes with a new cache folder

LOADS = """
import sys
from engine.host.process import prepare_process
prepare_process()
from engine.cpu.ops import CpuOps
CpuOps(sys.argv[1], deferred=True)
import numba
import numpy as np
from engine.cpu import kernel_units
from loader.configs.kernel_sets import KernelSet
unit = next(one for one in kernel_units.units(KernelSet("float32", ""), True) if one.name.startswith("rms_norm"))
print(unit.name, numba.config.CACHE_DIR)
print(unit.load(), [len(kernel.signatures) for kernel, _ in unit.kernels])
if unit.load():
    x = np.arange(1.0, 9.0, dtype=np.float32).reshape(2, 4)
    for kernel, _ in unit.kernels:
        out = np.empty_like(x)
        kernel(x, np.ones(4, np.float32), 0.0, False, out)
        assert np.allclose(out, x / np.sqrt((x * x).mean(1, keepdims=True))), out
"""


def loaded(cache: Path) -> tuple[str, str, str]:
    """Returns the name of a unit, the folder where its kernels are kept, and what loading them in a new process came to."""
    done = subprocess.run([sys.executable, "-c", LOADS, str(cache)], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    where, came_to = done.stdout.splitlines()
    name, folder = where.split(" ", 1)
    return name, folder, came_to


def test_a_unit_is_loaded_where_it_was_compiled_and_nowhere_compiled_by_loading(tmp_path, monkeypatch):
    """Two processes are asked to compile it, and the second one finds it. Neither imports torch, which takes longer than most units
    do."""
    name, folder, came_to = loaded(tmp_path)
    assert came_to == "False [0, 0]"
    assert not list(tmp_path.rglob("*.nb?"))
    monkeypatch.setattr(compiled, "folder", lambda: folder)
    kept = []
    for _ in range(2):
        process = kernel_builds._start(True)
        assert not kernel_builds._compile_in(process, ["float32", "", name])
        files = Path(f"/proc/{process.pid}/maps").read_text()
        assert "libllvmlite" in files
        assert "libtorch" not in files
        kernel_builds._end(process)
        assert process.returncode == 0
        kept.append({path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.nb?")})
    assert kept[0] == kept[1]
    assert len(kept[0]) == 4, "an index and the code of each kernel"
    assert loaded(tmp_path)[2] == "True [1, 1]"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", [*OF_DECODERS, *SETS])
def test_each_set_has_units_with_names_of_their_own(dtype: str, name: str) -> None:
    found = kernel_units.units(KernelSet(dtype, name), True)
    assert found
    assert len({unit.name for unit in found}) == len(found)
    alone = kernel_units.units(KernelSet(dtype, name), False)
    assert [len(unit.kernels) for unit in alone] == [1] * len(found)


def test_a_unit_of_two_sets_is_the_same() -> None:
    both = [set(kernel_units.units(KernelSet(dtype, "ranks"), True)) for dtype in ("float32", "bfloat16")]
    assert {unit.name.split("-")[0] for unit in both[0] & both[1]} == {"keep_own_experts", "keep_own_turns", "sum_ranks", "clear"}


def test_an_unknown_set_is_an_error() -> None:
    with pytest.raises(ValueError, match="'int2' is no set of kernels"):
        kernel_units.units(KernelSet("float32", "int2"), True)
