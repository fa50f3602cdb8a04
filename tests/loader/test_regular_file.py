"""Files that somebody else put in place: what is no regular file is refused, and what calls itself one may be none."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from loader.files import regular_file


def test_a_file_is_read_up_to_its_limit(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"12345")
    assert regular_file.read_regular(tmp_path / "a", 5) == b"12345"
    with pytest.raises(OSError, match="is longer than 4 bytes"):
        regular_file.read_regular(tmp_path / "a", 4)


def test_a_pipe_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a")
    with pytest.raises(OSError, match="is a named pipe, not a regular file"):
        regular_file.read_regular(tmp_path / "a", 5)


def test_a_file_without_anything_to_read_at_the_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For root, /proc/kmsg is such a file: it says of itself that it is regular. The test reads a pipe, which needs no root."""
    reading, writing = os.pipe2(os.O_NONBLOCK)
    monkeypatch.setattr(regular_file, "open_regular", lambda path: reading)
    with pytest.raises(OSError, match="has nothing to read at the moment"):
        regular_file.read_regular(tmp_path / "a", 5)
    os.close(writing)
