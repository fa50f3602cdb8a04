"""Where the tests' kernels are kept compiled, between runs too: python -m tests.kernel_cache compiles what is missing.

`make test` does it first: where the machine is slow it takes longer than a test may."""

from __future__ import annotations

import functools
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CACHE_DIR = str(ROOT / ".pytest_cache" / "kernels")


@functools.cache
def warm() -> None:
    """Compiles those that are missing, so that no test waits for a compiler: a minute the first time, on two cores."""
    formats = ("--int8", "--fp8", "--mxfp4", "--nvfp4", "--int4", "--int4-zeros", "--adapters", "--ranks")
    command = [sys.executable, "-m", "engine.warm", CACHE_DIR, *formats]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    warm()
