"""Proves and measures the GPU path, in three commands: `correctness`, `speed` and `system` (benchmarks/gpu_parts.py), of at most
nine minutes each whatever hangs: 510 s to ask for a GPU, install wheels and run all parts, and 30 s to delete checkpoints.

Each part is a process of its own, with seconds of its own and those that the parts before it left; one part's failure costs no
other part. Between two parts the device is asked whether it still answers, so that one that hangs is waited for once. Results are
on disk as they come. Exits 2 where there is no GPU, 1 if a part failed.
usage: python -m benchmarks.gpu [--check] [--out FOLDER] [--only correctness|speed|system|PART,PART] [--limit-s 510] [--tiny]
       [--wheels FOLDER]
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, TextIO

from benchmarks import gpu_aims
from benchmarks.gpu_drives import PREFIX, SHARED, drives
from benchmarks.gpu_parts import ALL, COMMANDS, PARTS, Part, chosen
from benchmarks.gpu_report import Report

ROOT = pathlib.Path(__file__).resolve().parent.parent
LIMIT_S = 510.0  # of all but the deletion: what comes before the parts is taken from their time
ABOUT = ("-m", "benchmarks.gpu_about")
ABOUT_LIMIT_S, WHEELS_LIMIT_S = 45.0, 60.0
BEFORE_S = 12.0  # to ask for a GPU and to install wheels where neither is slow; torch alone is imported in some seconds
MIN_S = 10.0  # with less a part is not begun
KILL_LIMIT_S = 5.0  # a process that waits for the driver may not end even then
KILL_ASKED_S = 1.0  # the same, of one that only asks
PROBE = ("-m", "benchmarks.gpu_probe")
PROBE_S, PROBE_LIMIT_S, MOST_PROBES = 3.0, 6.0, 3  # of one that answers, of one that does not, and how often it is asked again
RECOVERED = 0.9  # of the free memory at the beginning: what a killed process held takes seconds to come back
DISK_BYTES = 30 << 30  # enough for all parts of a command (tests/test_gpu_memory.py)
DELETE_LIMIT_S = 30.0  # after LIMIT_S: the machine that runs a command ends it after ten minutes
TINY_FACTOR = 4  # interpreted on a CPU everything takes longer


def about_gpu() -> dict[str, Any] | None:
    """Returns what a process of its own tells of the GPU, None if torch can use none: a process that has seen the device through
    torch may hold half a GiB of it for as long as it lives."""
    return _told([sys.executable, *ABOUT], ABOUT_LIMIT_S)


def use_wheels(folder: pathlib.Path) -> str:
    """Installs the wheels that this python lacks (gpu_wheels.py), and has the parts find them. Returns why it could not, or ""."""
    command = [sys.executable, "-m", "benchmarks.gpu_wheels", "--use", str(folder)]
    process = subprocess.Popen(command, cwd=ROOT, text=True, start_new_session=True)  # so that pip ends with it
    ended = _end_of(process, WHEELS_LIMIT_S)
    if ended != "well":
        return f"the wheels of {folder} could not be installed: {ended}"
    site = str(folder / "site")
    os.environ["PYTHONPATH"] = os.pathsep.join([site, os.environ.get("PYTHONPATH", "")])
    sys.path.insert(0, site)  # what the tests are started with is looked up in this process
    importlib.invalidate_caches()
    return ""


def run_part(part: Part, report: Report, limit_s: float, tiny: bool) -> bool:
    """Runs a part and returns whether it ended well. JSON lines it prints are taken as they come; all it prints goes to its log."""
    arguments = part.command()
    environment = dict(os.environ, PYTHONUNBUFFERED="1", PYTHONPATH=os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    if tiny:
        environment["TRITON_INTERPRET"] = "1"
        if not part.is_tests:
            arguments.append("--tiny")
    print(f"$ python -m {' '.join(arguments)}   # at most {limit_s:.0f} s", flush=True)
    began_s = time.monotonic()
    begins_at = report.log.stat().st_size if report.log.exists() else 0
    with report.log.open("a") as log:
        log.write(f"==== {part.name}\n")
        log.flush()
        process = subprocess.Popen(
            [sys.executable, "-m", *arguments],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,  # so that what it starts ends with it
        )
        printed = threading.Thread(target=_take_lines, args=(process, report, log), daemon=True)
        printed.start()
        ended = _end_of(process, limit_s)
        printed.join(KILL_LIMIT_S)
        if not printed.is_alive():  # else something it started holds the pipe
            assert process.stdout is not None
            process.stdout.close()
    seconds = time.monotonic() - began_s
    report.add({"benchmark": "gpu_parts", "part": part.name, "seconds": round(seconds, 1), "limit_s": limit_s, "ended": ended})
    if ended != "well":
        print(f"{part.name}: {ended}; the end of {report.log}:", flush=True)
        own = report.log.read_bytes()[begins_at:].decode(errors="replace")
        print("".join(f"    {line}\n" for line in own.splitlines()[-25:]), flush=True)
    return ended == "well"


def _take_lines(process: subprocess.Popen[str], report: Report, log: TextIO) -> None:
    assert process.stdout is not None
    with contextlib.suppress(ValueError):  # the log is closed: the part was given up
        for text in process.stdout:
            log.write(text)
            log.flush()
            if text.startswith('{"benchmark"'):
                try:
                    line = json.loads(text)
                except json.JSONDecodeError:  # cut off by the process's end
                    continue
                report.add(line)
                print(text, end="", flush=True)


def _end_of(process: subprocess.Popen[str], limit_s: float) -> str:
    """Waits for it, ends it after limit_s, and says which it was."""
    try:
        code = process.wait(limit_s)
        return "well" if code == 0 else f"exit {code}"
    except subprocess.TimeoutExpired:
        return _killed(process)
    finally:
        with contextlib.suppress(ProcessLookupError):  # what it started and left behind holds the device, too
            os.killpg(process.pid, signal.SIGKILL)


def _killed(process: subprocess.Popen[str]) -> str:
    os.killpg(process.pid, signal.SIGKILL)
    try:
        process.wait(KILL_LIMIT_S)
    except subprocess.TimeoutExpired:
        return "out of time, and not ended by SIGKILL"
    return "out of time"


def answers(command: Sequence[str], least_gib: float) -> dict[str, Any] | None:
    """Returns what the probe reports of the device, once it has least_gib free or was asked MOST_PROBES times; None if it told
    nothing."""
    told: dict[str, Any] | None = None
    for number in range(MOST_PROBES):
        if number:
            time.sleep(1.0)
        found = _told([sys.executable, *command], PROBE_LIMIT_S)
        told = found if found is not None and "free_gib" in found else told
        if told is not None and told["free_gib"] >= least_gib:
            break
    return told


def _told(command: Sequence[str], limit_s: float) -> dict[str, Any] | None:
    """Returns what a process that asks for the device printed; None if that is nothing, or nothing in time."""
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        told: dict[str, Any] | None = json.loads(process.communicate(timeout=limit_s)[0] or "null")
        return told
    except json.JSONDecodeError:
        return None
    except subprocess.TimeoutExpired:
        process.kill()
        assert process.stdout is not None
        process.stdout.close()
        with contextlib.suppress(subprocess.TimeoutExpired):  # one that waits for the driver may not end
            process.wait(KILL_ASKED_S)
        return None


def kept_s(num_parts: int) -> float:
    """Seconds that no part gets: a probe for each, one device that does not answer, and a process that does not end."""
    return num_parts * PROBE_S + MOST_PROBES * (PROBE_LIMIT_S + KILL_ASKED_S + 1) + KILL_LIMIT_S


def seconds_for(parts: Sequence[Part], left_s: float) -> float:
    """Returns the seconds that the first of these parts may take: all that are left except the other parts' limits, but at least
    its own limit if that much is left."""
    return min(left_s, max(left_s - sum(part.limit_s for part in parts[1:]), parts[0].limit_s))


def run_parts(parts: Sequence[Part], report: Report, limit_s: float, tiny: bool, probe: Sequence[str] = PROBE) -> list[str]:
    """Runs the parts in turn, and returns the names of those that failed or were not begun. probe: () for none."""
    end_s = time.monotonic() + limit_s
    failed, free_gib = list[str](), 0.0
    for number, part in enumerate(parts):
        told = answers(probe, free_gib * RECOVERED) if probe else {}
        if told is None:
            for one in parts[number:]:
                report.add(
                    {"benchmark": "gpu_parts", "part": one.name, "seconds": 0, "ended": "not started: no answer from the GPU"}
                )
            return failed + [one.name for one in parts[number:]]
        if told:
            free_gib = free_gib or told["free_gib"]
            report.add({"benchmark": "gpu_probe", "before": part.name} | told)
        left_s = end_s - time.monotonic() - kept_s(len(parts) - number if probe else 0)
        seconds = seconds_for(parts[number:], left_s)
        if seconds < min(MIN_S, part.limit_s):
            report.add({"benchmark": "gpu_parts", "part": part.name, "seconds": 0, "ended": "not started: no time left"})
            failed.append(part.name)
        elif not run_part(part, report, round(seconds, 1), tiny):
            failed.append(part.name)
    return failed


def conclude(parts: Sequence[Part], failed: Sequence[str], report: Report) -> str:
    """Adds the summary to the report, and returns it: aims with what was measured, what falls short, which parts failed."""
    lines = [line for line in report.lines if line["benchmark"] == "gpu_parts"]
    ended, seconds = ({line["part"]: line[key] for line in lines} for key in ("ended", "seconds"))
    table, missed, lacking = gpu_aims.summary({part.name for part in parts}, report.lines)
    summed = {"failed": list(failed), "missed": missed, "not_measured": lacking, "part_seconds": seconds}
    report.add({"benchmark": "gpu_summary"} | summed)
    failures = [f"{part.name}: {ended.get(part.name, '')}" for part in parts if part.name in failed]
    told = [
        f"- {kind}: {one}"
        for kind, ones in (("failed", failures), ("short of its aim", missed), ("no figure", lacking))
        for one in ones
    ]
    took = f"- seconds: {', '.join(f'{name} {value:g}' for name, value in seconds.items())}"
    text = "\n".join(["## Summary", "", table, "", *(told or ["Every part ended well and every aim was met."]), took])
    with report.md.open("a") as file:
        file.write("\n" + text + "\n")
    return text


@contextlib.contextmanager
def shared_checkpoints() -> Iterator[None]:
    """Gives the parts a folder on a drive in which they share checkpoints (gpu_checkpoints.py). It is deleted in the end, and so
    takes no part's time: that of some 20 GB took longer than what is left to one. Without a drive there is none."""
    found = sorted(drives(), key=lambda drive: -min(drive[1], DISK_BYTES))
    if not found:
        yield
        return
    folder = tempfile.mkdtemp(prefix=PREFIX, dir=found[0][0])
    os.environ[SHARED] = folder
    try:
        yield
    finally:
        del os.environ[SHARED]
        print(deleted(folder), flush=True)


still_deleting: list[subprocess.Popen[bytes]] = []


def deleted(folder: str, limit_s: float = DELETE_LIMIT_S) -> str:
    """Deletes a folder with all that is in it, and says how long that took. It goes on by itself after limit_s."""
    began_s = time.monotonic()
    process = subprocess.Popen(["rm", "-rf", folder], start_new_session=True)
    try:
        code = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        still_deleting.append(process)
        return f"the checkpoints in {folder} are still being deleted after {limit_s:.0f} s"
    seconds = time.monotonic() - began_s
    return f"checkpoints deleted in {seconds:.1f} s" if code == 0 else f"{folder} could not be deleted: rm ended with {code}"


def main() -> int:
    began_s = time.monotonic()
    parser = argparse.ArgumentParser(
        prog="benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path(".gpu-results"), help="folder for the results")
    parser.add_argument("--check", action="store_true", help="only say whether there is a GPU")
    parser.add_argument("--only", default="", help=f"a command ({', '.join(COMMANDS)}), or parts: {','.join(PARTS)}")
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="for all but the deletion of checkpoints")
    parser.add_argument("--wheels", type=pathlib.Path, help="install from here what this python lacks (benchmarks/gpu_wheels.py)")
    parser.add_argument(
        "--tiny", action="store_true", help="no GPU: everything on the CPU, interpreted, to show that the scripts run"
    )
    options = parser.parse_args()
    about = {"gpu": "none: interpreted on the CPU"} if options.tiny else about_gpu()
    if about is None:
        why = f"{sys.executable} has no torch that finds a CUDA device"
        print(f"make gpu: {why}; `make gpu-dry` runs the same scripts, interpreted", file=sys.stderr)
        return 2
    print(" · ".join(f"{key} {value}" for key, value in about.items()), flush=True)
    if options.check:
        return 0
    if not options.only and not options.tiny:
        parser.error(f"--only: one of {', '.join(COMMANDS)}, each nine minutes at most; or parts: {','.join(PARTS)}")
    try:
        parts = chosen(options.only or ALL)
    except KeyError as error:
        parser.error(f"--only {error.args[0]}: the commands are {', '.join(COMMANDS)}, the parts {','.join(PARTS)}")
    if options.wheels and (why := use_wheels(options.wheels.resolve())):
        print(f"make gpu: {why}", file=sys.stderr)
        return 1
    with shared_checkpoints():
        return run(parts, options, about, began_s)


def run(parts: Sequence[Part], options: argparse.Namespace, about: dict[str, Any], began_s: float) -> int:
    """Runs the parts, and returns the exit code. began_s: when the command began, on the monotonic clock."""
    report = Report(options.out, f"gpu-{options.only}" if options.only in COMMANDS else "gpu")
    report.add({"benchmark": "gpu"} | about)
    left_s = options.limit_s - (time.monotonic() - began_s)
    limit_s = TINY_FACTOR * sum(part.limit_s for part in parts) if options.tiny else left_s
    failed = run_parts(parts, report, limit_s, options.tiny, () if options.tiny else PROBE)
    print(f"\n{report.markdown()}\n{conclude(parts, failed, report)}\n\nwritten to {options.out}")
    if options.tiny:
        print("Interpreted on the CPU no figure means anything, and most have none: what counts is that every part ended well.")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
