"""What `hearth lend` refuses before it listens, and that it ends when it is told to."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from daemon.lending.lender import Lender
from loader.threads import Thread
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


# Runs the command in 30 processes, of which the n-th gets a signal as its main thread begins the n-th line of Python after it has
# said what it lends, and prints their exit codes. Those that come to no such line get the signal after a second.
AT_EACH_LINE = """
import argparse, os, signal, sys, threading, time
import daemon.engines.fork_client, daemon.gpu.inventory, daemon.lending.lender
from daemon.cli import lend

parser = argparse.ArgumentParser()
lend.add_options(parser)
options = parser.parse_args(sys.argv[1:], argparse.Namespace(json=False))

def run(number):
    num_lines = -1

    def told(as_json, text):
        nonlocal num_lines
        if num_lines < 0:
            late.start()
            num_lines = 0

    def trace(frame, event, _):
        nonlocal num_lines
        if event == "line" and num_lines >= 0:
            num_lines += 1
            if num_lines == number:
                os.kill(os.getpid(), signal.SIGTERM)
        return trace

    lend._tell = told
    late = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGTERM))
    late.daemon = True
    sys.settrace(trace)
    return lend.lend(None, options)

pids = []
for number in range(1, 31):
    pids.append(os.fork())
    if not pids[-1]:
        os._exit(run(number))
codes, until_s = [], time.monotonic() + 20.0
for pid in pids:
    while not (ended := os.waitpid(pid, os.WNOHANG))[0]:
        if time.monotonic() > until_s:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    codes.append(os.waitstatus_to_exitcode(ended[1]))
print(codes)
"""


def test_it_ends_whenever_a_signal_comes(tmp_path: Path) -> None:
    """One that came as the command began to wait, with the lock held that its handler took, stopped it for ever."""
    (tmp_path / "key").write_text(KEY)
    options = ["--listen", "127.0.0.1:0", "--key-file", str(tmp_path / "key"), "--device", "cpu:0=64MiB"]
    command = [sys.executable, "-P", "-c", AT_EACH_LINE, *options]
    ended = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=60, check=False)
    assert ended.stdout == f"{[0] * 30}\n", ended.stderr


def test_a_connection_that_is_accepted_as_it_ends_lends_nothing() -> None:
    """Its thread begins after the other connections were shut."""
    lender = Lender([], KEY.encode(), "/nowhere", "/nowhere", lambda line: None)
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as proxy:
        accepted, _ = listener.accept()
        thread = Thread(target=lender._connection, args=(accepted, "peer"))
        lender._threads.add(thread)
        lender.stop(listener)
        thread.start()
        proxy.settimeout(5.0)
        assert proxy.recv(1) == b""
        thread.join(5.0)
        assert not lender._threads
