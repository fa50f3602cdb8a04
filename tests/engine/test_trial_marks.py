"""A TrialMark tells later engines of one that ended in its trial, and of none that is still making it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from engine.cuda.trial_marks import TrialMark

NAME = "attention [3.0]*"  # characters that patterns of files give a meaning
SET = """
import sys, time
from pathlib import Path
from engine.cuda.trial_marks import TrialMark
with TrialMark(Path(sys.argv[1]), sys.argv[2]).set():
    print(flush=True)
    time.sleep(60)
"""


def engine_in_its_trial(folder: Path) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-c", SET, str(folder), NAME], stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]
    )
    assert process.stdout is not None
    process.stdout.readline()
    return process


def test_a_trial_that_ends_leaves_nothing(tmp_path: Path) -> None:
    mark = TrialMark(tmp_path, NAME)
    with mark.set():
        (file,) = tmp_path.iterdir()
        assert str(os.getpid()) in file.name
        assert mark.left() is None, "its engine lives"
    assert not list(tmp_path.iterdir())


def test_an_engine_that_is_killed_in_its_trial_leaves_its_mark(tmp_path: Path) -> None:
    """Also while another engine makes the same trial, whose mark does not go with that of the first."""
    first, second = engine_in_its_trial(tmp_path), engine_in_its_trial(tmp_path)
    mark = TrialMark(tmp_path, NAME)
    try:
        assert mark.left() is None
        with mark.set():
            pass
        assert len(list(tmp_path.iterdir())) == 2
        first.send_signal(signal.SIGKILL)
        first.wait(10)
        left = mark.left()
        assert left is not None
        assert left.name.endswith(f"-{first.pid}")
        assert TrialMark(tmp_path, "other").left() is None
    finally:
        for process in (first, second):
            process.kill()
            process.communicate()
    left.unlink()
    left = mark.left()
    assert left is not None
    assert left.name.endswith(f"-{second.pid}")


def test_an_error_leaves_the_mark(tmp_path: Path) -> None:
    mark = TrialMark(tmp_path, NAME)
    with pytest.raises(RuntimeError), mark.set():
        raise RuntimeError("the device is lost")
    assert mark.left() is not None


def test_it_must_be_writable(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"), TrialMark(tmp_path / "missing", NAME).set():
        pytest.fail("it tries")
    assert TrialMark(tmp_path / "missing", NAME).left() is None
