"""The processes from which tests fork daemons (daemon_forks.py)."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.e2e.daemon_forks import ForkedDaemon
from tests.e2e.node import Node


@pytest.mark.parametrize("number", range(2))
def test_the_daemons_of_every_test_are_forked(tmp_path: Path, number: int) -> None:
    with Node(tmp_path) as node:
        assert isinstance(node.process, ForkedDaemon)
        assert node.stop() == 0


def test_a_daemon_with_an_environment_of_its_own_is_started_with_exec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEARTHD_TEST_OF_FORKS", "1")
    with Node(tmp_path) as node:
        assert isinstance(node.process, subprocess.Popen)
