"""The end of an engine that does not notice that its daemon is gone."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from engine.host.orphan import EXIT_ORPHAN
from tests.e2e.node import ROOT

STUCK = """
import sys, threading
from engine.host import orphan
orphan.NOTICED_WITHIN_S = 0.1
orphan.end_with(int(sys.argv[1]))
print("watches", flush=True)
threading.Event().wait()
"""


def test_a_process_that_is_stuck_ends_once_the_other_end_is_closed() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        command = [sys.executable, "-c", STUCK, str(theirs.fileno())]
        process = subprocess.Popen(command, cwd=ROOT, pass_fds=[theirs.fileno()], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"watches\n"
    ours.send(b"what arrives does not matter")
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.5)
    ours.close()
    assert process.wait(10) == EXIT_ORPHAN
    process.stdout.close()
