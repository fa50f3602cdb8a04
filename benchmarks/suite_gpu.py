"""Measures what the tests of the GPU path take of the suite on a machine without a GPU: the test files that import `engine.cuda`,
Triton or the scripts of `make gpu`, themselves or by helpers, and those that start a process which does. `tests/e2e` is left out.

usage: python -m benchmarks.suite_gpu [--at-once 2] [--list]. Triton's cache is that of the checkout, empty in a fresh one.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import pathlib
import re
import resource
import subprocess
import sys
import time

from benchmarks.run import machine, table
from benchmarks.server import ROOT

TESTS = ROOT / "tests"
TRITON_CACHE = ROOT / ".pytest_cache" / "triton"
LEFT_OUT = ("tests.e2e.", "tests.gpu.", "tests.test_docs")
OF_GPUS = ("engine.cuda", "triton", "benchmarks.gpu", "benchmarks.launch_path", "benchmarks.machine_code")
STARTED = re.compile(r"tests\.engine\.[\w.]+|benchmarks\.\w+")  # a string that names a module to be run


def modules() -> dict[str, pathlib.Path]:
    """Returns all modules of the tests, by their names."""
    return {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for path in sorted(TESTS.rglob("*.py"))
    }


def named_by(path: pathlib.Path) -> set[str]:
    """Returns the names that a file imports, and the modules that its strings name."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.update((node.module, *(f"{node.module}.{alias.name}" for alias in node.names)))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and STARTED.fullmatch(node.value):
            found.add(node.value)
    return found


def files() -> list[str]:
    """Returns the test files of the GPU path, relative to the checkout."""
    paths = modules()
    named = {name: named_by(path) for name, path in paths.items()}
    found = {name for name, others in named.items() if any(other.startswith(OF_GPUS) for other in others)}
    while more := {name for name, others in named.items() if name not in found and others & found}:
        found |= more
    chosen = [name for name in sorted(found) if paths[name].name.startswith("test_") and not name.startswith(LEFT_OUT)]
    return [str(paths[name].relative_to(ROOT)) for name in chosen]


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.suite_gpu", description=__doc__)
    parser.add_argument("--at-once", type=int, default=2, help="files that are tested at once")
    parser.add_argument("--list", action="store_true", help="print the files, and measure nothing")
    options = parser.parse_args()
    chosen = files()
    if options.list:
        print("\n".join(chosen))
        return
    was_empty = not TRITON_CACHE.exists()
    command = [sys.executable, "-m", "pytest", "-q", "-n", str(options.at_once), "--dist", "loadfile", *chosen]
    began_s = time.monotonic()
    done = subprocess.run(
        command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env={**os.environ, "HEARTHD_TEST_KERNELS": "compiled"}
    )
    elapsed_s, used = time.monotonic() - began_s, resource.getrusage(resource.RUSAGE_CHILDREN)
    counts = {what: int(number) for number, what in re.findall(r"(\d+) (passed|failed|skipped|error)", done.stdout[-300:])}
    line = {
        "benchmark": "suite_gpu",
        **machine(),
        "files": len(chosen),
        **counts,
        "at_once": options.at_once,
        "compiled_before": not was_empty,
        "cpu_s": round(used.ru_utime + used.ru_stime),
        "elapsed_s": round(elapsed_s),
    }
    print(json.dumps(line))
    headings = {"files": "files", "passed": "passed", "failed": "failed", "cpu_s": "processor s", "elapsed_s": "elapsed s"}
    print(f"\n{table([line], headings)}\n")
    if done.returncode:
        print(done.stdout[-3000:], file=sys.stderr)
    raise SystemExit(done.returncode)


if __name__ == "__main__":
    main()
