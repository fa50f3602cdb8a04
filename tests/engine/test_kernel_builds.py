"""Kernels compiled by other processes: when they come into use, what is reported meanwhile, and what a crash of the compiler
leaves.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from engine.contracts.loads import KernelNews
from engine.cpu import kernel_builds
from engine.cpu.kernel_builds import CpuKernelBuilds
from engine.cpu.kernels import wanted
from engine.host import compiled

# stands in for a process of `_start`: writes the names it is asked for to a file, and crashes at one name
PROCESS = """
import json, os, sys
for line in sys.stdin:
    name = json.loads(line)[2]
    with open(sys.argv[1], "a") as file:
        print(name, file=file)
    if name == sys.argv[2]:
        os.abort()
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
    used: list[tuple[str, str]] = field(default_factory=list)
    num_processes: int = 0

    @property
    def asked(self) -> list[str]:
        return self.asked_for.read_text().split() if self.asked_for.exists() else []


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Machine]:
    def make(units: list[Unit], crashes_at: str = "", command: str = sys.executable) -> Machine:
        news: list[KernelNews] = []
        used: list[tuple[str, str]] = []
        builds = CpuKernelBuilds(2, 2, lambda dtype, quantize: used.append((dtype, quantize)), news.append)
        made = Machine(builds, tmp_path / "asked", news, used)

        def start(parallel: bool) -> subprocess.Popen[str]:
            assert parallel
            made.num_processes += 1
            arguments = [command, "-c", PROCESS, str(made.asked_for), crashes_at]
            return subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)

        monkeypatch.setattr(kernel_builds, "_start", start)
        monkeypatch.setattr(kernel_builds, "units", lambda dtype, parallel, quantize: units)
        monkeypatch.setattr(kernel_builds, "prepare_calls", lambda units: None)
        return made

    return make


def test_what_is_there_is_in_use_at_once(machine):
    one = machine([Unit("a", is_there=True), Unit("b", is_there=True)])
    one.builds.need("bfloat16")
    assert (one.used, one.num_processes, one.news) == ([("bfloat16", "")], 0, [])
    one.builds.need("bfloat16")
    assert len(one.used) == 1


def test_what_is_missing_is_compiled_elsewhere_and_used_when_it_is_said(machine):
    units = [Unit("a", is_there=True), *(Unit(name) for name in "bcdefg")]
    one = machine(units)
    one.builds.need("float16", "int8")
    one.builds.wait()
    assert sorted(one.asked) == list("bcdefg")
    assert one.num_processes == 2
    assert one.used == []
    told, apply = one.news[-1].told, one.news[-1].apply
    assert (told.kind, told.num_units, told.problem) == ("", 0, "")
    first = one.news[0].told
    assert (first.kind, first.num_units) == ("float32 with int8 weights", 6)
    assert 0 < first.left_s < 60
    assert apply is not None
    apply()
    assert one.used == [("float32", "int8")]
    assert one.builds.problems == {}


def test_a_compiler_that_crashes_is_started_again_for_the_rest_and_its_unit_is_left(machine, caplog):
    one = machine([Unit(name) for name in "abcdef"], crashes_at="c")
    one.builds.need("bfloat16")
    one.builds.wait()
    assert sorted(one.asked) == list("abcdef")
    assert one.num_processes in (2, 3)  # no third one is needed if the crash comes last
    assert [news.apply for news in one.news] == [None] * len(one.news)
    assert one.news[-1].told.kind == ""
    assert one.news[-1].told.problem == "kernels for bfloat16: the compiler ended with signal 6 at c"
    assert "kernels for bfloat16 are not in use" in caplog.text
    one.builds.need("bfloat16")
    one.builds.wait()
    assert len(one.asked) == 6


def test_without_processes_nothing_is_compiled_and_it_is_told(machine):
    one = machine([Unit("a")], command="/nonexistent/python")
    one.builds.need("bfloat16")
    one.builds.wait()
    assert one.used == []
    assert "No such file" in one.news[-1].told.problem


def test_one_process_does_it_all_where_another_does_not_start(machine, monkeypatch):
    one = machine([Unit(name) for name in "abcd"])
    start, num_asked = kernel_builds._start, iter(range(9))

    def start_once(parallel: bool) -> subprocess.Popen[str]:
        if next(num_asked):
            raise OSError("no more processes")
        return start(parallel)

    monkeypatch.setattr(kernel_builds, "_start", start_once)
    one.builds.need("bfloat16")
    one.builds.wait()
    assert sorted(one.asked) == list("abcd")
    assert one.news[-1].apply is not None
    assert one.builds.problems == {}


@pytest.mark.parametrize(("lost", "told"), [("a", "a"), ("bc", "b and 1 more"), ("abcd", "a and 3 more")])
def test_what_a_full_cache_folder_does_not_keep_is_told_and_not_used(machine, caplog, lost, told):
    one = machine([Unit(name, keeps=name not in lost) for name in "abcd"])
    one.builds.need("bfloat16")
    one.builds.wait()
    problem = f"kernels for bfloat16: {compiled.folder()} did not keep {told}; is its disk full?"
    assert [news.apply for news in one.news] == [None] * len(one.news)
    assert (one.news[-1].told.kind, one.news[-1].told.problem) == ("", problem)
    one.builds.need("bfloat16")
    one.builds.wait()
    assert caplog.text.count("kernels for bfloat16 are not in use, models of it stay slow") == 1
    assert len(one.asked) == 4


def test_two_kinds_are_compiled_one_after_the_other(machine, monkeypatch):
    one = machine([])
    monkeypatch.setattr(kernel_builds, "units", lambda dtype, parallel, quantize: [Unit("a"), Unit("b")])
    both_are_needed, run = threading.Event(), one.builds._run_process
    monkeypatch.setattr(one.builds, "_run_process", lambda *args: (both_are_needed.wait(), run(*args)))
    one.builds.need("bfloat16")
    one.builds.need("float32")
    both_are_needed.set()
    one.builds.wait()
    assert one.num_processes == 2, "the processes of one kind compile the next, too"
    kinds = list(dict.fromkeys(news.told.kind for news in one.news))
    assert kinds == ["bfloat16", "float32", ""]
    for news in one.news:
        if news.apply is not None:
            news.apply()
    assert one.used == [("bfloat16", ""), ("float32", "")]


def test_an_exception_is_told(machine, monkeypatch):
    one = machine([Unit("a")])
    may_run, run = threading.Event(), one.builds._run_process
    monkeypatch.setattr(one.builds, "_run_process", lambda *args: (may_run.wait(), run(*args)))
    one.builds.need("bfloat16")
    monkeypatch.setattr(Unit, "load", lambda self: 1 / 0)
    may_run.set()
    one.builds.wait()
    assert "ZeroDivisionError" in one.news[-1].told.problem


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
        assert kernel_builds._compile_in(process, ["bfloat16", "", name])
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0
    assert errors.split() == ["compiling", "c", "compiling", "a"]


# ---- real kernels, in processes with a new cache folder

LOADS = """
import sys
from engine.host.process import prepare_process
prepare_process()
from engine.cpu.ops import CpuOps
CpuOps(sys.argv[1], deferred=True)
import numba
import numpy as np
from engine.cpu.kernels import wanted
unit = next(one for one in wanted.units("float32", True, "") if one.name.startswith("rms_norm"))
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
    """Two processes are asked to compile it, and the second one finds it."""
    name, folder, came_to = loaded(tmp_path)
    assert came_to == "False [0, 0]"
    assert not list(tmp_path.rglob("*.nb?"))
    monkeypatch.setattr(compiled, "folder", lambda: folder)
    kept = []
    for _ in range(2):
        process = kernel_builds._start(True)
        assert kernel_builds._compile_in(process, ["float32", "", name])
        kernel_builds._end(process)
        assert process.returncode == 0
        kept.append({path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.nb?")})
    assert kept[0] == kept[1]
    assert len(kept[0]) == 4, "an index and the code of each kernel"
    assert loaded(tmp_path)[2] == "True [1, 1]"


@pytest.mark.parametrize(("dtype", "quantize"), [("float32", ""), ("bfloat16", ""), ("bfloat16", "int8"), ("float32", "int8")])
def test_units_have_names_of_their_own_and_the_longest_come_first(dtype, quantize):
    found = wanted.units(dtype, True, quantize)
    assert len({unit.name for unit in found}) == len(found)
    seconds = [unit.seconds for unit in found]
    assert seconds == sorted(seconds, reverse=True)
    alone = wanted.units(dtype, False, quantize)
    assert [len(unit.kernels) for unit in alone] == [1] * len(found)
