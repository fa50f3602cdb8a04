"""Where the tests' kernels are kept compiled, between runs too: python -m tests.kernel_cache compiles what is missing.

`make test` does it first: where the machine is slow it takes longer than a test may."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CACHE_DIR = str(ROOT / ".pytest_cache" / "kernels")
DONE = "HEARTHD_TEST_KERNELS"  # `make test` sets it for the tests, since finding all kernels compiled takes seconds, too


@functools.cache
def warm() -> None:
    """Compiles those that are missing, so that no test waits for a compiler: a minute the first time, on two cores. Where DONE is
    "compiled", none are."""
    if os.environ.get(DONE) == "compiled":
        return
    of_int8 = ("--int8", "--int8-experts")
    formats = ("--fp8", "--mxfp4", "--nvfp4", "--int4", "--int4-zeros", "--packed", "--adapters", "--ranks")
    _compile(ROOT, *of_int8, *formats)


def warm_tree(tree: Path) -> None:
    """Compiles the kernels that chaos needs of a copy of the packages, which has none of its own for its path."""
    _compile(tree, "--packed", "--adapters", "--ranks")


def _compile(tree: Path, *what: str) -> None:
    command = [sys.executable, "-P", "-m", "engine.warm", CACHE_DIR, *what]
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    subprocess.run(command, cwd=tree, check=True, stdout=subprocess.DEVNULL, env=environment)


if __name__ == "__main__":
    os.environ.pop(DONE, None)
    warm()
