"""Proves and measures the GPU path: the tests that need a GPU, then every GPU benchmark, each in a process of its own.

One part's failure, or its running out of time, costs no other part: each has its own seconds, all of them together no more than
--limit-s, and beside them those that the parts before it left. Results are on disk as they come: `gpu.jsonl` (every line), `gpu.md`
(tables), `gpu.log` (what each part wrote). Exits 2 where there is no GPU, 1 if a part failed.
usage: python -m benchmarks.gpu [--check] [--out FOLDER] [--only tests,kernels] [--limit-s 530] [--tiny]
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TextIO

ROOT = pathlib.Path(__file__).resolve().parent.parent


@dataclass(slots=True, frozen=True)
class Part:
    """module and arguments; limit_s: the time that is its own, whatever the others do."""

    name: str
    arguments: tuple[str, ...]
    limit_s: float


PROCESSES = ("-n", "6") if importlib.util.find_spec("xdist") else ()
# The most valuable first: where time does not suffice, that of the first is cut last.
PARTS = (
    Part("forward", ("benchmarks.gpu_forward",), 90),
    Part("server", ("benchmarks.gpu_server", "--what", "serve"), 100),
    # another torch's warnings are no failures; kernels are compiled in several processes where pytest can
    Part("tests", ("pytest", "-q", "-ra", "-W", "default", "-p", "no:cacheprovider", *PROCESSES, "tests/gpu"), 70),
    Part("kernels", ("benchmarks.gpu_kernels",), 45),
    Part("cohost", ("benchmarks.gpu_server", "--what", "cohost"), 45),
    Part("memory", ("benchmarks.gpu_memory",), 25),
    Part("adoption", ("benchmarks.gpu_adoption",), 45),
    Part("loading", ("benchmarks.gpu_loading",), 40),
    Part("throughput", ("benchmarks.gpu_throughput", "--engine", "ours"), 30),
    Part("peer", ("benchmarks.gpu_throughput", "--engine", "transformers"), 45),
)
LIMIT_S = 540.0
LOG = "gpu.log"
MIN_S = 10.0  # with less a part is not begun
KILL_LIMIT_S = 5.0  # a process that waits for the driver may not end even then


def about_gpu() -> dict[str, Any] | None:
    """None: there is no GPU that torch can use."""
    try:
        import torch
    except ImportError:
        return None
    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(0)
    line = {
        "gpu": properties.name,
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "multiprocessors": properties.multi_processor_count,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": sys.version.split()[0],
        "cores": os.cpu_count(),
    }
    try:
        import triton

        line["triton"] = triton.__version__
    except ImportError:
        line["triton"] = None
    return line


class Report:
    """The files in --out, brought up to date with every line."""

    def __init__(self, out: pathlib.Path) -> None:
        out.mkdir(parents=True, exist_ok=True)
        self.out, self.lines = out, list[dict[str, Any]]()
        self._lock = threading.Lock()
        (out / "gpu.jsonl").write_text("")
        (out / LOG).write_text("")

    def add(self, line: dict[str, Any]) -> None:
        with self._lock:
            self.lines.append(line)
            with (self.out / "gpu.jsonl").open("a") as file:
                file.write(json.dumps(line) + "\n")
            (self.out / "gpu.md").write_text(self.markdown())

    def markdown(self) -> str:
        parts = [" · ".join(f"{key} {value}" for key, value in self.lines[0].items())]
        titles = list(dict.fromkeys(_title(line) for line in self.lines[1:]))
        for title in titles:
            rows = [
                {k: v for k, v in line.items() if k not in ("benchmark", "what")}
                for line in self.lines[1:]
                if _title(line) == title
            ]
            columns = list(dict.fromkeys(key for row in rows for key in row))
            head = "| " + " | ".join(column.replace("_", " ") for column in columns) + " |"
            body = ["| " + " | ".join(str(row.get(column, "")) for column in columns) + " |" for row in rows]
            parts.append("\n".join([f"### {title}", "", head, "|" + "---|" * len(columns), *body]))
        return "\n\n".join(parts) + "\n"


def _title(line: dict[str, Any]) -> str:
    return " ".join(str(line[key]) for key in ("benchmark", "what") if key in line)


def run_part(part: Part, report: Report, limit_s: float, tiny: bool) -> bool:
    """Whether it ended well. JSON lines it prints are taken as they come; all it prints goes to its log."""
    arguments = [*part.arguments]
    environment = dict(os.environ, PYTHONUNBUFFERED="1", PYTHONPATH=os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    if tiny:
        environment["TRITON_INTERPRET"] = "1"
        if part.arguments[0] != "pytest":
            arguments.append("--tiny")
    print(f"$ python -m {' '.join(arguments)}   # at most {limit_s:.0f} s", flush=True)
    began_s = time.monotonic()
    log_path = report.out / LOG
    begins_at = log_path.stat().st_size if log_path.exists() else 0
    with log_path.open("a") as log:
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
        printed = threading.Thread(target=_take_lines, args=(process, part, report, log), daemon=True)
        printed.start()
        ended = _end_of(process, limit_s)
        printed.join(KILL_LIMIT_S)
        if not printed.is_alive():  # else something it started holds the pipe
            assert process.stdout is not None
            process.stdout.close()
    seconds = time.monotonic() - began_s
    report.add({"benchmark": "gpu_parts", "part": part.name, "seconds": round(seconds, 1), "ended": ended})
    if ended != "well":
        print(f"{part.name}: {ended}; the end of {log_path}:", flush=True)
        own = log_path.read_bytes()[begins_at:].decode(errors="replace")
        print("".join(f"    {line}\n" for line in own.splitlines()[-25:]), flush=True)
    return ended == "well"


def _take_lines(process: subprocess.Popen[str], part: Part, report: Report, log: TextIO) -> None:
    assert process.stdout is not None
    with contextlib.suppress(ValueError):  # the log is closed: the part was given up
        for text in process.stdout:
            log.write(text)
            log.flush()
            if text.startswith("{"):
                report.add(json.loads(text))
                print(text, end="", flush=True)
            elif part.arguments[0] == "pytest":
                print(text, end="", flush=True)


def _end_of(process: subprocess.Popen[str], limit_s: float) -> str:
    """Waits for it, ends it after limit_s, and says which it was."""
    try:
        code = process.wait(limit_s)
        return "well" if code == 0 else f"exit {code}"
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
    try:
        process.wait(KILL_LIMIT_S)
    except subprocess.TimeoutExpired:
        return "out of time, and not ended by SIGKILL"
    return "out of time"


def seconds_for(parts: Sequence[Part], left_s: float) -> float:
    """What the first of these parts may take: all but what is the others' own; less where even that is not left."""
    return min(left_s, max(left_s - sum(part.limit_s for part in parts[1:]), parts[0].limit_s))


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path(".gpu-results"), help="folder for the results")
    parser.add_argument("--check", action="store_true", help="only say whether there is a GPU")
    parser.add_argument("--only", help=f"some of {','.join(part.name for part in PARTS)}")
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="for all parts together")
    parser.add_argument(
        "--tiny", action="store_true", help="no GPU: everything on the CPU, interpreted, to show that the scripts run"
    )
    options = parser.parse_args()
    wanted = options.only.split(",") if options.only else [part.name for part in PARTS]
    unknown = set(wanted) - {part.name for part in PARTS}
    if unknown:
        parser.error(f"--only {','.join(sorted(unknown))}: the parts are {','.join(part.name for part in PARTS)}")
    end_s = time.monotonic() + options.limit_s
    about = {"gpu": "none: interpreted on the CPU"} if options.tiny else about_gpu()
    if about is None:
        why = f"{sys.executable} has no torch that finds a CUDA device"
        print(f"make gpu: {why}; `make gpu-dry` runs the same scripts, interpreted", file=sys.stderr)
        return 2
    if options.check:
        print(" · ".join(f"{key} {value}" for key, value in about.items()))
        return 0
    report = Report(options.out)
    report.add({"benchmark": "gpu"} | about)
    failed = []
    parts = [part for part in PARTS if part.name in wanted]
    for number, part in enumerate(parts):
        limit_s = seconds_for(parts[number:], end_s - time.monotonic() - KILL_LIMIT_S)
        if limit_s < MIN_S:
            report.add({"benchmark": "gpu_parts", "part": part.name, "seconds": 0, "ended": "not started: no time left"})
            failed.append(part.name)
        elif not run_part(part, report, limit_s, options.tiny):
            failed.append(part.name)
    print(f"\n{report.markdown()}\nwritten to {options.out}" + (f"; failed: {', '.join(failed)}" if failed else ""))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
