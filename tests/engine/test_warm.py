"""The program that compiles kernels in advance checks its arguments, and its compiling processes end with the process that started
them.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_a_compiling_process_ends_with_who_started_it(tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-m", "engine.warm", str(tmp_path), "--unit-by-unit", "all"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(60) == 0


def test_an_unknown_dtype_is_named(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "engine.warm", str(tmp_path), "float8"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert "no kernels for float8" in done.stderr
