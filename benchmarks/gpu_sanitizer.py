"""Every Triton kernel under compute-sanitizer, one shape each, compared with its twin: accesses outside of memory (memcheck) and
races in shared memory (racecheck). torch's own cache of memory is off, or an access beyond a tensor would lie inside another one.
One JSON line a tool; exits 1 if one found something. Where there is no compute-sanitizer it says so and ends well.

usage: python -m benchmarks.gpu_sanitizer [--tiny]: the same shapes without the tools, interpreted on the CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
import time
from typing import Any

from benchmarks.gpu_watched import watched

TOOLS = {"memcheck": r"ERROR SUMMARY: (\d+) error", "racecheck": r"RACECHECK SUMMARY: (\d+) hazard"}
PLACES = ("/usr/local/cuda/bin/compute-sanitizer", "/opt/cuda/bin/compute-sanitizer")
LIMIT_S = 62.0  # for a tool
SHAPES = ("-m", "tests.gpu.one_shape")


def tell(**figures: Any) -> None:
    print(json.dumps({"benchmark": "gpu_sanitizer"} | figures), flush=True)


def sanitizer() -> str | None:
    return shutil.which("compute-sanitizer") or next((place for place in PLACES if os.access(place, os.X_OK)), None)


def run(tool: str, program: str, shapes: list[str]) -> int:
    """Returns the number of errors that the tool found or, if it did not end, of those it had named by then."""
    began_s = time.perf_counter()
    command = [program, "--tool", tool, "--target-processes", "all", sys.executable, *shapes]
    text, code = watched(command, LIMIT_S, PYTORCH_NO_CUDA_MEMORY_CACHING="1")
    print(text, flush=True)
    summary = re.search(TOOLS[tool], text)
    named = len(re.findall(r"^=+ (?:Invalid|Error|Program hit|Misaligned)", text, re.M))
    errors = int(summary[1]) if summary else named
    kernels = re.findall(r"^(\w+): [\d.]+ s$", text, re.M)
    tell(
        what=tool,
        errors=errors,
        kernels=len(kernels),
        last=kernels[-1] if kernels else "",
        ended="well" if code == 0 else "out of time" if code is None else f"exit {code}",
        seconds=round(time.perf_counter() - began_s, 1),
    )
    # a case that differs from its twin ends the program, too
    return errors + (code not in (0, None) and not errors)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="benchmarks.gpu_sanitizer", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tiny", action="store_true")
    if parser.parse_args().tiny:
        text, code = watched([sys.executable, *SHAPES, "--tiny", "norms", "rope", "sampling"], LIMIT_S)
        print(text, flush=True)
        tell(what="shapes, interpreted", ended=f"exit {code}")
        sys.exit(code)
    program = sanitizer()
    if program is None:
        tell(what="none", skipped="there is no compute-sanitizer on this machine")
        return
    errors = sum(run(tool, program, list(SHAPES)) for tool in TOOLS)
    tell(what="total", errors=errors)
    sys.exit(1 if errors else 0)


if __name__ == "__main__":
    main()
