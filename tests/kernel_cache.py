"""Where the tests' kernels are kept compiled, between runs too."""

from __future__ import annotations

import functools
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CACHE_DIR = str(ROOT / ".pytest_cache" / "kernels")


@functools.cache
def warm() -> None:
    """Compiles those that are missing, so that no test waits for a compiler: half a minute the first time."""
    subprocess.run([sys.executable, "-m", "engine.warm", CACHE_DIR], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
