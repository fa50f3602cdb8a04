"""One state folder for one daemon: the second one is refused, and nothing keeps out the next one."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
from pathlib import Path

import pytest

from daemon.record import state_lock
from tests.e2e.checkpoints import make_model
from tests.e2e.node import Node, environment


def test_a_second_daemon_with_the_state_folder_is_refused(tmp_path: Path) -> None:
    make_model(tmp_path / "a" / "models" / "m")
    second = Node(tmp_path / "b", flags=["--state-dir", str(tmp_path / "a" / "state")])
    with Node(tmp_path / "a") as first:
        assert first.process is not None
        assert first.cli("pin", "m").returncode == 0
        told = subprocess.run(second.command(), capture_output=True, text=True, timeout=60, env=environment())
        says = f"another hearthd uses it (process {first.process.pid}); name another with --state-dir DIR"
        assert (told.returncode, told.stderr.splitlines()[-1]) == (1, f"hearthd: state_dir {tmp_path}/a/state: {says}")
        assert not Path(second.control).exists()
        assert first.cli("status").returncode == 0
        first.process.send_signal(signal.SIGKILL)  # its engines go on for a while
        first.process.wait()
        with second:
            assert second.cli("status").returncode == 0


def test_a_forked_process_does_not_hold_the_lock(tmp_path: Path) -> None:
    def locked() -> bool:
        """Returns whether a process of its own finds the folder locked."""
        if (pid := os.fork()) == 0:
            try:
                state_lock.lock(str(tmp_path))
            except OSError:
                os._exit(1)
            os._exit(0)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1

    told_ready, ready = os.pipe()
    told_end, end = os.pipe()
    if (holder := os.fork()) == 0:
        state_lock.lock(str(tmp_path))
        if os.fork() == 0:
            os.write(ready, b"x")
            os.close(end)
            os.read(told_end, 1)  # lives on after the holder
            os._exit(0)
        signal.pause()
    os.read(told_ready, 1)
    assert locked()
    os.kill(holder, signal.SIGKILL)
    os.waitpid(holder, 0)
    assert not locked()
    for fd in (told_ready, ready, told_end, end):
        os.close(fd)


@pytest.mark.parametrize("call", ["open", "lockf"])
def test_without_locks_nothing_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    def fails(*_: object) -> int:
        raise OSError(errno.ENOLCK if call == "lockf" else errno.EROFS, "no")

    monkeypatch.setattr(f"daemon.record.state_lock.{'fcntl' if call == 'lockf' else 'os'}.{call}", fails)
    state_lock.lock(str(tmp_path))
