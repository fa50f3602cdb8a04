"""The processes from which tests fork daemons (daemon_forks.py)."""

from __future__ import annotations

import resource
import subprocess
from pathlib import Path

import pytest

from tests.e2e.daemon_forks import ForkedDaemon
from tests.e2e.node import Node, environment, usual_environment


@pytest.mark.parametrize("number", range(2))
def test_the_daemons_of_every_test_are_forked(tmp_path: Path, number: int) -> None:
    with Node(tmp_path) as node:
        assert environment() == usual_environment(), "a test before this one has changed it"
        assert isinstance(node.process, ForkedDaemon)
        assert node.stop() == 0


def test_a_forked_daemon_has_the_limits_of_this_process(tmp_path: Path) -> None:
    """Tests raise the limit of open files of the process that they share with others, where it is below what the system allows."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    limits = 1 << 40, before[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    try:
        with Node(tmp_path) as node:
            assert isinstance(node.process, ForkedDaemon)
            assert resource.prlimit(node.process.pid, resource.RLIMIT_FSIZE) == limits
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_daemon_with_an_environment_of_its_own_is_started_with_exec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEARTHD_TEST_OF_FORKS", "1")
    with Node(tmp_path) as node:
        assert isinstance(node.process, subprocess.Popen)
