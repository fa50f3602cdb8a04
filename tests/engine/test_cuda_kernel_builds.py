"""The kernels of a model on a GPU are compiled before its load, by other processes, once: what they leave is what the engine looks
for, what is told meanwhile, and what a crash, a cancelled load and another engine of the node do.
"""

from __future__ import annotations

import fcntl
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("triton")

from engine.contracts.loads import LoadCancelled
from engine.cuda import kernel_builds
from engine.cuda.compile_process import CompileJob
from engine.cuda.kernel_builds import CudaKernelBuilds
from engine.protocol import KernelsTold
from tests.engine.kernels.key_cases import BLOCK_TOKENS, CASES, KeyCase

ROOT = Path(__file__).parents[2]
HOPPER = 90
CASE: KeyCase = CASES[0]
SHARE: KeyCase = next(case for case in CASES if case.share is not None)
COMPILED: KeyCase = next(case for case in CASES if case.pooling)  # it has fewest kernels, since it draws no tokens
# stands in for a process that compiles: prints what is given, as lines, does what is put in, and ends with the exit code
PROCESS = "import sys, time; sys.stdin.read(); print('\\n'.join(sys.argv[2:]), flush=True); {}; sys.exit(int(sys.argv[1]))"
HANG = "time.sleep(600)"
# takes the road of an engine's launches in a new process: prints how many kernels are in the folder, and how many are not
LOOK = """
import sys
import msgspec, triton
from engine.cuda.compile_process import CompileJob
from engine.cuda.launch_only import launch_only_model
from engine.cuda.launches import recorded
job = msgspec.json.decode(sys.stdin.buffer.read(), type=CompileJob)
triton.knobs.cache.dir = job.folder
found = []
triton.knobs.compilation.listener = lambda *, cache_hit, **_: found.append(cache_hit)
with recorded(job.capability) as launches:
    launch_only_model(job.spec, job.shape, job.block_tokens).launch_all()
for launch in launches.values():
    launch.compile()
print(found.count(True), found.count(False))
"""
# a compiler in a process whose libraries abort when it is finalised; of so many shares the last one has no kernel
ABORTS = """
import atexit, os, runpy, sys
atexit.register(os.abort)
sys.argv = ["compile_process", "999", "1000"]
runpy.run_module("engine.cuda.compile_process", run_name="__main__", alter_sys=True)
"""


class Machine:
    """One GPU's builds, with stand-ins for the processes that compile."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        folder.mkdir(exist_ok=True)
        self.folder, self.told, self.started = folder, [], 0
        self.prints: list[str] = ["units 2", "done", "done"]
        self.code = 0
        self.then = "pass"
        self.processes: list[subprocess.Popen[bytes]] = []
        self.builds = CudaKernelBuilds(str(folder), HOPPER, BLOCK_TOKENS, 2, lambda news: self.told.append(news.told))
        patch.setattr(kernel_builds, "KERNEL_WAIT_EVERY_S", 0.01)
        patch.setattr(kernel_builds, "_start", self._start)

    def _start(self, share: int, num_shares: int) -> subprocess.Popen[bytes]:
        assert num_shares == 2
        command = [sys.executable, "-c", PROCESS.format(self.then), str(self.code), *self.prints]
        self.processes.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
        return self.processes[-1]

    def need(self, case: KeyCase = CASE, waiting: Any = lambda: None, adapters: bool = False) -> None:
        self.builds.need(case.spec, case.shape, waiting, adapters)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path / "triton", monkeypatch)


def test_the_engine_finds_what_was_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = ROOT / ".pytest_cache" / "triton"  # what an earlier run has compiled need not be compiled again
    folder.mkdir(parents=True, exist_ok=True)
    for mark in folder.glob("compiled-*"):
        mark.unlink()
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    told: list[KernelsTold] = []
    CudaKernelBuilds(str(folder), HOPPER, BLOCK_TOKENS, 2, lambda news: told.append(news.told)).need(
        COMPILED.spec, COMPILED.shape, lambda: None
    )
    (mark,) = folder.glob("compiled-*")
    assert (told[0].kind, told[0].loads_wait, told[-1].kind) == (COMPILED.name, True, "")
    job = msgspec.json.encode(CompileJob(COMPILED.spec, COMPILED.shape, BLOCK_TOKENS, HOPPER, str(folder)))
    looked = subprocess.run([sys.executable, "-c", LOOK], cwd=ROOT, input=job, capture_output=True, timeout=100, check=True)
    found, missing = map(int, looked.stdout.split())
    assert missing == 0
    assert found > 20


@pytest.mark.parametrize("case", [CASE, SHARE], ids=["whole", "share"])
def test_a_compiler_that_is_done_is_not_finalised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: KeyCase) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    job = msgspec.json.encode(CompileJob(case.spec, case.shape, BLOCK_TOKENS, HOPPER, str(tmp_path)))
    ended = subprocess.run([sys.executable, "-c", ABORTS], cwd=ROOT, input=job, capture_output=True, timeout=100, check=False)
    assert (ended.returncode, ended.stdout) == (0, b"units 0\n"), ended.stderr.decode()


def test_it_happens_once_for_each_kind_of_model(machine: Machine) -> None:
    machine.need()
    assert len(machine.processes) == 2
    machine.need()
    assert len(machine.processes) == 2
    for _ in range(2):
        machine.need(adapters=True)
        assert len(machine.processes) == 4, "kernels of adapters are compiled when the first one comes"
    machine.processes.clear()
    again = CudaKernelBuilds(str(machine.folder), HOPPER, BLOCK_TOKENS, 2, lambda news: None)
    again.need(CASE.spec, CASE.shape, lambda: None)
    other_place = msgspec.structs.replace(CASE.spec, placement_id=7, model="other", path="/elsewhere", lease_chunks=9)
    again.need(other_place, CASE.shape, lambda: None)
    assert len(machine.processes) == 0
    again.need(msgspec.structs.replace(CASE.spec, kv_cache_dtype="fp8"), CASE.shape, lambda: None)
    assert len(machine.processes) == 2
    CudaKernelBuilds(str(machine.folder), 100, BLOCK_TOKENS, 2, lambda news: None).need(CASE.spec, CASE.shape, lambda: None)
    assert len(machine.processes) == 4
    again.need(CASE.spec, SHARE.shape, lambda: None)
    assert len(machine.processes) == 6, "a share of a split model has kernels of other sizes"


def test_a_folder_that_is_gone_leaves_the_kernels_to_the_load(machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    machine.folder.rmdir()
    machine.need()
    assert "cannot be compiled ahead, its load compiles them: [Errno 2] No such file or directory" in caplog.text
    assert not machine.processes


def test_a_compiler_that_fails_leaves_the_rest_to_the_load(machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    machine.code, machine.prints = 3, ["units 2", "done"]
    machine.need()
    assert "its load compiles the rest: a compiler ended with 3; a compiler ended with 3" in caplog.text
    assert machine.told[-1] == KernelsTold("", 0, 0, 0.0)
    assert not list(machine.folder.glob("compiled-*"))
    machine.code = 0
    machine.need()
    assert len(machine.processes) == 4


def test_a_compiler_that_prints_something_else_is_ended(machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    """Nobody reads what it prints from then on, so the load would wait for its end without limit."""
    machine.prints, machine.then = ["units many"], "time.sleep(10)"
    machine.need()
    assert "a compiler's output could not be read: ValueError" in caplog.text
    assert "its load compiles the rest: a compiler ended with -9; a compiler ended with -9" in caplog.text
    assert not list(machine.folder.glob("compiled-*"))


def test_where_no_process_starts_the_load_goes_on(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    machine.need()
    assert "No such file" in caplog.text
    assert not list(machine.folder.glob("compiled-*"))


def test_a_compiler_that_does_not_end_is_ended(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kernel_builds, "LIMIT_S", 0.0)
    machine.then = HANG
    machine.need()
    assert "not done within 0 s" in caplog.text
    assert [process.poll() is not None for process in machine.processes] == [True, True]


def test_progress_is_told_until_a_cancelled_load_ends_its_compilers(machine: Machine) -> None:
    machine.then, machine.prints = HANG, ["units 2", "done"]

    def waiting() -> None:
        if machine.told[-1].num_done == 2:
            raise LoadCancelled("cancelled")

    with pytest.raises(LoadCancelled):
        machine.need(waiting=waiting)
    assert [process.poll() is not None for process in machine.processes] == [True, True]
    last, over = machine.told[-2:]
    assert (last.kind, last.num_done, last.num_units, last.loads_wait) == (CASE.name, 2, 4, True)
    assert over == KernelsTold("", 0, 0, 0.0)
    assert not list(machine.folder.glob("compiled-*"))


def test_two_engines_compile_one_after_the_other(machine: Machine) -> None:
    """Another engine of the node holds the lock: the load waits, and tells that it does; then the kernels are there already."""
    waited = threading.Event()
    with open(machine.folder / "compiling", "wb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        load = threading.Thread(target=machine.need, kwargs={"waiting": waited.set}, daemon=True)
        load.start()
        assert waited.wait(20)
        assert not machine.processes
    load.join(20)
    assert not load.is_alive()
    assert len(machine.processes) == 2
