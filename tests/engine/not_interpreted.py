"""Runs modules in processes of their own in which Triton compiles kernels, as it does not in the tests' own process: that one
interprets them."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[2]
KERNEL_CACHE = {"TRITON_CACHE_DIR": str(ROOT / ".pytest_cache" / "triton")}  # keeps what was compiled for the next run


def environment() -> dict[str, str]:
    """Returns this process's environment variables, but for the one that makes Triton interpret kernels."""
    return {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}


def output_of(module: str, *arguments: str, limit_s: float = 220, **further: str) -> str:
    """Runs a module and returns what it prints. further: environment variables. Raises AssertionError with the end of what it
    wrote to standard error if it fails."""
    command = [sys.executable, "-m", module, *arguments]
    of_child = environment() | further
    done = subprocess.run(command, cwd=ROOT, env=of_child, capture_output=True, text=True, timeout=limit_s, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
