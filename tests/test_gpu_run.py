"""`make gpu` ends in time and keeps what it has, whatever its parts and the device do."""

from __future__ import annotations

import ctypes
import json
import os
import random
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import gpu as gpu_command
from benchmarks import gpu_aims
from benchmarks.gpu import (
    ABOUT_LIMIT_S,
    BEFORE_S,
    DELETE_LIMIT_S,
    KILL_ASKED_S,
    KILL_LIMIT_S,
    LIMIT_S,
    MOST_PROBES,
    PROBE_LIMIT_S,
    PROBE_S,
    WHEELS_LIMIT_S,
    answers,
    conclude,
    deleted,
    kept_s,
    run_part,
    run_parts,
    seconds_for,
    shared_checkpoints,
    still_deleting,
    use_wheels,
)
from benchmarks.gpu_about import about_gpu
from benchmarks.gpu_drives import SHARED
from benchmarks.gpu_parts import COMMANDS, OTHERS, PARTS, Part, chosen
from benchmarks.gpu_probe import NUM_BYTES, Refused, probe
from benchmarks.gpu_report import Report

LINE = json.dumps({"benchmark": "told", "value": 7})
ROOT = Path(__file__).parents[1]
CALL_LIMIT_S = 600  # of a command on the machine that runs it
FREE = ("-c", "print('{\"free_gib\": 70.0}')")
HUNG = ("-c", "import time; time.sleep(60)")


def part(code: str, limit_s: float = 60) -> Part:
    return Part("part", ("timeit", "-n", "1", "-r", "1", code), limit_s)


def ends(report: Report) -> list[str]:
    return [line["ended"] for line in report.lines if line["benchmark"] == "gpu_parts"]


def new_report(folder: Path) -> Report:
    made = Report(folder, "gpu-speed")
    made.add({"benchmark": "gpu", "gpu": "none"})
    return made


@pytest.fixture
def report(tmp_path: Path) -> Report:
    return new_report(tmp_path)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_parts_of_a_command_keep_their_own_seconds(command: str) -> None:
    """Whatever those before them do, and with probes that hang reckoned with."""
    parts = COMMANDS[command]
    assert BEFORE_S + sum(one.limit_s for one in parts) + kept_s(len(parts)) <= LIMIT_S
    for seed in range(100):
        hang, left_s, began = random.Random(seed), LIMIT_S - BEFORE_S - kept_s(len(parts)), 0
        for number, one in enumerate(parts):
            limit_s = seconds_for(parts[number:], left_s)
            assert limit_s >= one.limit_s
            left_s -= limit_s if hang.random() < 0.5 else hang.random() * one.limit_s
            began += 1
        assert began == len(parts)
        assert left_s >= 0
    assert seconds_for(parts, 20.0) == 20.0


def test_all_that_a_command_does_ends_in_time_and_texts_say_when() -> None:
    """Two things may hang that are not ended by SIGKILL: the last part begun, with what holds its pipe, and then each probe."""
    recipe = subprocess.run(["make", "-n", "gpu", "ONLY=speed"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert recipe.count("-m benchmarks.") == 1, "what another process takes is on no clock"
    assert ABOUT_LIMIT_S + KILL_ASKED_S + WHEELS_LIMIT_S + KILL_LIMIT_S < LIMIT_S
    assert kept_s(2) >= 2 * KILL_LIMIT_S + MOST_PROBES * (PROBE_LIMIT_S + KILL_ASKED_S + 1)
    total_s = LIMIT_S + DELETE_LIMIT_S
    assert total_s <= CALL_LIMIT_S - 20, "make, python and the summary take some, too"
    assert total_s == 9 * 60
    for name in ("Makefile", "docs/gpu.md", "benchmarks/gpu.py"):
        text = " ".join((ROOT / name).read_text().split())
        assert "nine minutes " in text, name
    documented = " ".join((ROOT / "docs/gpu.md").read_text().split())
    assert f"{LIMIT_S:.0f} s for all it does, then at most {DELETE_LIMIT_S:.0f} s to delete" in documented
    assert f"(once, {ABOUT_LIMIT_S:.0f} s at most) and to install wheels ({WHEELS_LIMIT_S:.0f} s)" in documented
    assert f"{PROBE_S:.0f} s are kept for that, and {PROBE_LIMIT_S:.0f} s is how long" in documented


def test_what_comes_before_the_parts_is_taken_from_their_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    given, asked = list[float](), list[str]()

    def about(gpu: str = "a card") -> dict[str, Any]:
        asked.append(gpu)
        time.sleep(0.3)
        return {"gpu": gpu}

    def wheels(folder: Path) -> str:
        time.sleep(0.3)
        return "" if folder == tmp_path else "another folder"

    def parts(parts: object, report: object, limit_s: float, *rest: object) -> list[str]:
        given.append(limit_s)
        return []

    monkeypatch.setattr(gpu_command, "about_gpu", about)
    monkeypatch.setattr(gpu_command, "use_wheels", wheels)
    monkeypatch.setattr(gpu_command, "run_parts", parts)
    monkeypatch.delenv(SHARED, raising=False)
    monkeypatch.setattr(sys, "argv", ["gpu", "--only", "speed", "--out", str(tmp_path / "out"), "--wheels", str(tmp_path)])
    assert gpu_command.main() == 0
    assert (len(given), len(asked)) == (1, 1)
    assert 0 < given[0] <= LIMIT_S - 0.6


class Unending(subprocess.Popen[str]):
    """Stands for a process that waits for the driver, which SIGKILL does not end."""

    def kill(self) -> None:
        begun.append(self)


begun: list[Unending] = []


def test_a_device_that_hangs_torch_is_none_after_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_command, "ABOUT", HUNG)
    monkeypatch.setattr(gpu_command, "ABOUT_LIMIT_S", 0.2)
    monkeypatch.setattr(subprocess, "Popen", Unending)
    began_s = time.monotonic()
    assert gpu_command.about_gpu() is None
    assert time.monotonic() - began_s < 30
    (process,) = begun
    begun.clear()
    subprocess.Popen.terminate(process)
    process.wait(30)


def test_wheels_are_found_by_the_parts_and_a_failure_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("PYTHONPATH", "others")
    assert use_wheels(tmp_path) == "", "no wheels are none to install"
    assert os.environ["PYTHONPATH"] == f"{tmp_path}/site{os.pathsep}others"
    (tmp_path / "not_there-1-py3-none-any.whl").write_text("no wheel")
    monkeypatch.setattr(gpu_command, "WHEELS_LIMIT_S", 0.0)
    assert use_wheels(tmp_path) == f"the wheels of {tmp_path} could not be installed: out of time"


def test_commands_and_parts_are_chosen_by_name() -> None:
    assert [one.name for one in chosen("kernels,tests")] == ["kernels", "tests"]
    assert chosen("system") == list(COMMANDS["system"])
    assert [one.name for one in chosen("tests,correctness")] == ["tests", "cache", "soak", "sanitizer"]
    assert {"forward", "server", "tests", "kernels", "cohost", "memory", "adoption", "loading", "throughput", "peer"} <= set(PARTS)
    assert len(PARTS) == sum(map(len, COMMANDS.values())) + len(OTHERS), "two parts have one name"
    with pytest.raises(KeyError, match="nothing"):
        chosen("tests,nothing")


def test_a_part_that_hangs_is_ended_and_its_lines_are_kept(report: Report) -> None:
    code = f"print({LINE!r}); import subprocess, time; subprocess.Popen(['sleep', '60']); time.sleep(60)"
    assert not run_part(part(code, 2.0), report, 2.0, tiny=False)
    assert ends(report) == ["out of time"]
    kept = [json.loads(text) for text in report.jsonl.read_text().splitlines()]
    assert kept[1] == json.loads(LINE)
    assert "told" in report.md.read_text()


def test_parts_end_well_or_say_how(report: Report, capsys: pytest.CaptureFixture[str]) -> None:
    cut = LINE[:-4]
    assert run_part(part(f"print({cut!r}); print({LINE!r})"), report, 60, tiny=False)
    assert not run_part(part("raise ValueError('no such device')"), report, 60, tiny=False)
    assert ends(report) == ["well", "exit 1"]
    assert "no such device" in capsys.readouterr().out


def test_a_device_that_does_not_answer_is_waited_for_once(report: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parts after it are not begun, and their seconds are not spent."""
    monkeypatch.setattr("benchmarks.gpu.PROBE_LIMIT_S", 0.3)
    begun = [Part("one", part("pass").arguments, 5.0), Part("two", part("pass").arguments, 5.0)]
    assert run_parts(begun, report, 300, False, HUNG) == ["one", "two"]
    assert ends(report) == ["not started: no answer from the GPU"] * 2
    monkeypatch.setattr("benchmarks.gpu.PROBE_LIMIT_S", 30.0)
    assert run_parts(begun, report, 300, False, FREE) == []
    assert [line["before"] for line in report.lines if line["benchmark"] == "gpu_probe"] == ["one", "two"]


def test_the_probe_waits_for_memory_that_a_killed_process_held(tmp_path: Path) -> None:
    count = tmp_path / "count"
    count.write_text("")
    code = f"p = __import__('pathlib').Path({str(count)!r}); n = len(p.read_text()); p.write_text('x' * (n + 1));"
    asked = ("-c", code + "print('{\"free_gib\": %d}' % (10 + 60 * n))")
    assert answers(asked, 60.0) == {"free_gib": 70}
    assert answers(("-c", 'print(\'{"error": "cuInit: CUDA error 999"}\')'), 0.0) is None


class Driver:
    """Stands in for libcuda. refused: the call that fails, and its code."""

    def __init__(self, refused: str = "", writes: bool = True) -> None:
        self._refused, self._writes, self._held = refused, writes, b""
        self.called: list[str] = []

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            self.called.append(name)
            if name == self._refused:
                return 999
            if name == "cuMemsetD8_v2" and self._writes:
                self._held = bytes([arguments[1].value]) * arguments[2].value
            if name == "cuMemcpyDtoH_v2":
                ctypes.memmove(arguments[0], self._held or bytes(NUM_BYTES), NUM_BYTES)
            if name == "cuMemGetInfo_v2":
                for argument, gib in zip(arguments, (70, 80), strict=True):
                    argument._obj.value = gib << 30
            return 0

        return call


def test_a_probe_writes_and_reads_back() -> None:
    driver = Driver()
    told = probe(driver)
    assert (told["free_gib"], told["total_gib"]) == (70.0, 80.0)
    assert driver.called[-1] == "cuMemFree_v2"
    with pytest.raises(Refused, match="cuMemAlloc_v2: CUDA error 999"):
        probe(Driver("cuMemAlloc_v2"))
    with pytest.raises(Refused, match="read back"):
        probe(Driver(writes=False))


def test_checkpoints_are_shared_by_the_parts_of_a_run_and_deleted_in_the_end(
    report: Report, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(SHARED, raising=False)
    code = f"import os, pathlib; pathlib.Path(os.environ[{SHARED!r}], 'made').write_text('it'); print('in', os.environ[{SHARED!r}])"
    with shared_checkpoints():
        folder = Path(os.environ[SHARED])
        assert run_part(part(code), report, 60, tiny=False)
        assert (folder / "made").read_text() == "it"
    assert SHARED not in os.environ
    assert not folder.exists()
    assert "checkpoints deleted in" in capsys.readouterr().out


def test_a_deletion_that_fails_or_takes_long_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It fails no part, and a command ends in time."""
    monkeypatch.setenv("PATH", str(tmp_path))
    rm = tmp_path / "rm"
    rm.write_text("#!/bin/sh\nexit 3\n")
    rm.chmod(0o755)
    assert deleted("folder") == "folder could not be deleted: rm ended with 3"
    rm.write_text("#!/bin/sh\nexec /bin/sleep 1\n")
    assert "still being deleted after 0 s" in deleted("folder", 0.1)
    assert still_deleting.pop().wait(30) == 0


def decode_line(rows: int, of_floor: float) -> dict[str, Any]:
    return {"benchmark": "gpu_forward", "what": "decode", "model": "8b", "rows": rows, "context": 1024, "of_floor": of_floor}


def test_the_summary_names_what_falls_short_and_what_has_no_figure(report: Report) -> None:
    for line in (decode_line(1, 0.80), decode_line(64, 0.61)):
        report.add(line)
    report.add({"benchmark": "gpu_parts", "part": "mixed", "seconds": 1, "ended": "out of time"})
    text = conclude([PARTS["forward"], PARTS["mixed"]], ["mixed"], report)
    assert "- short of its aim: forward: 8B, a decode step of 1 / 64 / 128 rows" in text
    assert "0.8 / 0.61 ✗, aim ≥ 0.8 / 0.82 / 0.82" in text
    assert "- failed: mixed: out of time" in text
    assert "- no figure: mixed: 64 rows and a piece of a prompt" in text
    summed = report.lines[-1]
    assert summed["failed"] == ["mixed"]
    assert len(summed["missed"]) == 1
    assert summed["part_seconds"] == {"mixed": 1}
    assert "- seconds: mixed 1" in text
    assert text in report.md.read_text()


def test_every_aim_is_of_a_part_and_of_lines_that_its_script_prints() -> None:
    """A figure that was renamed would be looked for in vain, and each part but those that only tell has an aim."""
    for one in gpu_aims.AIMS:
        module = PARTS[one.part].arguments[0]
        name = "benchmarks.gpu_failures" if module == "pytest" else module
        source = (Path(__file__).parents[1] / (name.replace(".", "/") + ".py")).read_text()
        assert f'"{one.aim.benchmark}"' in source, one.part
        value = one.aim.value
        known = source + (Path(__file__).parents[1] / "benchmarks" / "load.py").read_text()
        assert f'"{value}"' in known or f"{value}=" in known or value.removeprefix("swap_in") in known, (one.part, value)
    without = {one.name for parts in COMMANDS.values() for one in parts} - {one.part for one in gpu_aims.AIMS}
    assert without == {"cache", "profile", "throughput", "ncu"}


def test_results_tell_which_libraries_they_are_of(monkeypatch: pytest.MonkeyPatch) -> None:
    card = SimpleNamespace(name="a card", total_memory=80 << 30, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: card)
    line = about_gpu()
    assert line is not None
    assert (line["gpu"], line["numpy"], line["torch"]) == ("a card", np.__version__, torch.__version__)
    monkeypatch.setitem(sys.modules, "triton", None)
    line = about_gpu()
    assert line is not None
    assert line["triton"] is None


@pytest.fixture
def no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has the pytest of a part start as if this one were no worker of another."""
    for name in [name for name in os.environ if name.startswith("PYTEST_XDIST_")]:
        monkeypatch.delenv(name)


@pytest.mark.usefixtures("no_worker")
def test_failures_are_told_as_they_come(tmp_path: Path) -> None:
    """Also those of a run that is ended before it can sum up, in one process and in several. Both runs take their limit, which is
    what they may need to begin on a busy machine: they go side by side."""
    test = tmp_path / "test_it.py"
    test.write_text(
        "import time\ndef test_well(): pass\ndef test_wrong(): assert 1 == 2, 'one is not two'\ndef test_long(): time.sleep(60)\n"
    )
    arguments = ("pytest", "-q", "-o", "addopts=", "-W", "default", "-p", "no:cacheprovider", "-p", "benchmarks.gpu_failures")
    workers = {"in one process": (), "in two": ("-n", "2")}
    parts = [Part(name, (*arguments, "-c", "/dev/null", *more, str(test)), 1) for name, more in workers.items()]
    reports = [new_report(tmp_path / part.name) for part in parts]
    with ThreadPoolExecutor(len(parts)) as pool:
        ended = list(pool.map(lambda part, report: run_part(part, report, 12.0, tiny=False), parts, reports))
    assert ended == [False, False]
    for report in reports:
        assert ends(report) == ["out of time"]
        (told,) = [line for line in report.lines if line["benchmark"] == "gpu_tests"]
        assert "test_wrong" in told["test"]
        assert "one is not two" in told["why"]


@pytest.mark.usefixtures("no_worker")
def test_the_outcomes_are_told_at_the_end(report: Report, tmp_path: Path) -> None:
    test = tmp_path / "test_it.py"
    test.write_text("import pytest\ndef test_well(): pass\n@pytest.mark.skip\ndef test_not(): pass\ndef test_wrong(): assert 0\n")
    tests = Part("tests", ("pytest", "-q", "-o", "addopts=", "-p", "benchmarks.gpu_failures", "-c", "/dev/null", str(test)), 60)
    assert not run_part(tests, report, 60, tiny=False)
    told = [line for line in report.lines if line["benchmark"] == "gpu_tests"][-1]
    assert {key: told[key] for key in ("what", "passed", "failed", "skipped")} == {
        "what": "outcomes", "passed": 1, "failed": 1, "skipped": 1,
    }  # fmt: skip
