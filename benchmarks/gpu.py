"""Proves and measures the GPU path: the tests that need a GPU, then every GPU benchmark, each in a process of its own.

One part's failure, or its running out of time, costs no other part; results are on disk as they come: `gpu.jsonl` (every line),
`gpu.md` (tables), `PART.log` (what each part wrote). Exits 2 where there is no GPU, 1 if a part failed.
usage: python -m benchmarks.gpu [--check] [--out FOLDER] [--only tests,kernels] [--limit-s 530] [--tiny]
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent


@dataclass(slots=True, frozen=True)
class Part:
    """module and arguments; limit_s: it is ended then. tiny: whether it runs without a GPU."""

    name: str
    arguments: tuple[str, ...]
    limit_s: float
    tiny: bool = True


PROCESSES = ("-n", "6") if importlib.util.find_spec("xdist") else ()
# The most valuable first: what comes last is what a slow machine does not get to.
PARTS = (
    Part("forward", ("benchmarks.gpu_forward",), 120),
    Part("server", ("benchmarks.gpu_server", "--what", "serve"), 150),
    # another torch's warnings are no failures; kernels are compiled in several processes where pytest can
    Part("tests", ("pytest", "-q", "-ra", "-W", "default", "-p", "no:cacheprovider", *PROCESSES, "tests/gpu"), 120),
    Part("kernels", ("benchmarks.gpu_kernels",), 70),
    Part("cohost", ("benchmarks.gpu_server", "--what", "cohost"), 80),
    Part("peer", ("benchmarks.gpu_throughput", "--engine", "transformers"), 100),
    Part("memory", ("benchmarks.gpu_memory",), 50),
    Part("throughput", ("benchmarks.gpu_throughput", "--engine", "ours"), 70),
)


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
        (out / "gpu.jsonl").write_text("")

    def add(self, line: dict[str, Any]) -> None:
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
    log_path = report.out / f"{part.name}.log"
    with log_path.open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", *arguments],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,  # so that what it starts ends with it
        )
        timer = _end_after(process, limit_s)
        assert process.stdout is not None
        for text in process.stdout:
            log.write(text)
            log.flush()
            if text.startswith("{"):
                report.add(json.loads(text))
                print(text, end="", flush=True)
            elif part.arguments[0] == "pytest":
                print(text, end="", flush=True)
        code = process.wait()
        timer.cancel()
    seconds = time.monotonic() - began_s
    ended = "out of time" if code == -signal.SIGKILL and seconds >= limit_s - 1 else f"exit {code}"
    well = code == 0
    report.add({"benchmark": "gpu_parts", "part": part.name, "seconds": round(seconds, 1), "ended": "well" if well else ended})
    if not well:
        print(f"{part.name}: {ended}; the end of {log_path}:", flush=True)
        print("".join(f"    {line}\n" for line in log_path.read_text().splitlines()[-25:]), flush=True)
    return well


def _end_after(process: subprocess.Popen[str], limit_s: float) -> Any:
    import threading

    def end() -> None:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)

    timer = threading.Timer(limit_s, end)
    timer.daemon = True
    timer.start()
    return timer


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path(".gpu-results"), help="folder for the results")
    parser.add_argument("--check", action="store_true", help="only say whether there is a GPU")
    parser.add_argument("--only", help=f"some of {','.join(part.name for part in PARTS)}")
    parser.add_argument("--limit-s", type=float, default=530, help="for all parts together")
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
    for part in PARTS:
        left_s = end_s - time.monotonic()
        if part.name not in wanted:
            continue
        if left_s < 15:
            report.add({"benchmark": "gpu_parts", "part": part.name, "seconds": 0, "ended": "not started: no time left"})
            failed.append(part.name)
        elif not run_part(part, report, min(part.limit_s, left_s), options.tiny):
            failed.append(part.name)
    print(f"\n{report.markdown()}\nwritten to {options.out}" + (f"; failed: {', '.join(failed)}" if failed else ""))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
