"""What a child process is given to find packages, and when the kernel ends it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from daemon.engines.engine_process import Spawned
from daemon.process import socket_child
from engine.host.child_process import OOM_SCORE_ADJ_OVER_DAEMON, PACKAGES, child_environment, end_before_daemon, malloc_tunables
from tests.oom import oom_score_adj


def test_our_packages_come_first_and_folders_given_to_us_are_handed_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"wheels/site::{tmp_path}/other")
    given = child_environment(OMP_NUM_THREADS="1")
    # the child runs elsewhere: a relative folder would be another one there
    assert given["PYTHONPATH"] == os.pathsep.join([str(PACKAGES), f"{tmp_path}/wheels/site", f"{tmp_path}/other"])
    assert given["OMP_NUM_THREADS"] == "1"
    monkeypatch.delenv("PYTHONPATH")
    assert child_environment()["PYTHONPATH"] == str(PACKAGES)


def test_tunables_are_added_to_those_that_are_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    assert malloc_tunables(tcache_count=4000) == "glibc.malloc.tcache_count=4000"
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.tcache_count=7:glibc.cpu.x86_ibt=off")
    both = "glibc.malloc.tcache_count=7:glibc.cpu.x86_ibt=off:glibc.malloc.mmap_threshold=5"
    assert malloc_tunables(tcache_count=4000, mmap_threshold=5) == both


def _with_exec() -> int:
    engine = Spawned(["--help"], [], {})
    adj = oom_score_adj(engine.pid)
    engine.kill()
    engine.wait()
    engine.close()
    engine.stderr.close()
    return adj


def _with_a_socket() -> int:
    process, connection = socket_child.spawn(["engine"], [], child_environment(), stderr=subprocess.DEVNULL)
    adj = oom_score_adj(process.pid)
    connection.close()
    process.kill()
    process.wait()
    return adj


@pytest.mark.parametrize("start", [_with_exec, _with_a_socket])
def test_the_kernel_ends_what_the_daemon_starts_before_the_daemon(start: Callable[[], int]) -> None:
    assert start() == min(1000, oom_score_adj(os.getpid()) + OOM_SCORE_ADJ_OVER_DAEMON)


def test_a_child_that_is_to_be_ended_earlier_yet_stays_so_and_one_that_has_ended_is_no_error() -> None:
    child = subprocess.Popen(["sleep", "60"])
    Path(f"/proc/{child.pid}/oom_score_adj").write_text("1000")
    end_before_daemon(child.pid)
    assert oom_score_adj(child.pid) == 1000
    child.kill()
    child.wait()
    end_before_daemon(child.pid)
