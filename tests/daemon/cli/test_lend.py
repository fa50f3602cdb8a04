"""What `hearth lend` refuses before it listens, and that it ends when it is told to."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.node import environment

KEY = "a key that both hosts know"


def lend(folder: Path, *more: str, key: str = KEY, listen: str = "127.0.0.1:0") -> subprocess.Popen[str]:
    (folder / "key").write_text(key)
    command = [sys.executable, "-P", "-m", "daemon.cli", "lend", "--listen", listen, "--key-file", str(folder / "key"), *more]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment())


@pytest.mark.parametrize(
    ("more", "key", "listen", "text"),
    [
        (["--device", "cpu:0"], KEY, "127.0.0.1:0", "device: 'cpu:0' must be NAME=BUDGET"),
        (["--device", "cpu:0=8GiB@b"], KEY, "127.0.0.1:0", "device: "),
        ([], "short", "127.0.0.1:0", "its first line must be a key of 16 characters or more"),
        ([], KEY, "127.0.0.1", "--listen '127.0.0.1' must be HOST:PORT"),
        ([], KEY, "192.0.2.77:7100", "--listen 192.0.2.77:7100: Cannot assign requested address"),
    ],
)
def test_what_is_refused(tmp_path: Path, more: list[str], key: str, listen: str, text: str) -> None:
    process = lend(tmp_path, *more, key=key, listen=listen)
    _, told = process.communicate(timeout=60)
    assert process.returncode == 2, told
    assert text in told


def test_it_says_what_it_lends_and_ends_at_a_signal(tmp_path: Path) -> None:
    process = lend(tmp_path, "--device", "cpu:0=64MiB", "--device", "cpu:1=32MiB")
    assert process.stderr is not None
    first = process.stderr.readline()
    assert first.startswith("hearth lend: cpu:0 with 64.0 MiB, cpu:1 with 32.0 MiB: to be borrowed at 127.0.0.1:"), first
    process.send_signal(signal.SIGTERM)
    _, rest = process.communicate(timeout=60)
    assert (process.returncode, rest) == (0, "hearth lend: ends\n")
