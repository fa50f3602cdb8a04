"""Tests of where compiled kernels are stored, and of what happens if that folder takes no files."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import numba
import numpy as np
import pytest
from numba.core.caching import IndexDataCacheFile

from engine.host import compiled

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def keeps_cache_dir(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restores numba's cache folder for other tests."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", numba.config.CACHE_DIR)


def triple(values: np.ndarray) -> np.ndarray:
    return values * 3


def check_compiles() -> None:
    kernel = numba.njit("float64[::1](float64[::1])", cache=True)(triple)
    assert kernel(np.ones(3)).tolist() == [3.0, 3.0, 3.0]


def test_a_full_disk_costs_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    compiled.keep_in(str(tmp_path))
    monkeypatch.setattr(IndexDataCacheFile, "_save_data", full)
    check_compiles()
    assert "No space left on device: a kernel is compiled again next time" in caplog.text
    monkeypatch.undo()


SAVES = """
import sys, time
from engine.host import compiled
compiled.keep_in_folder(sys.argv[1])
import numba
from numba.core.caching import IndexDataCacheFile
sys.path.insert(0, sys.argv[2])
from triples import triple
load_index = IndexDataCacheFile._load_index
def slowly(file):
    index = load_index(file)
    time.sleep(1.0)
    return index
if sys.argv[4:] == ["slowly"]:
    IndexDataCacheFile._load_index = slowly
triple.compile((getattr(numba, sys.argv[3]),))
print(sum(triple.stats.cache_hits.values()))
"""


def test_two_processes_that_save_forms_of_one_kernel_lose_none(tmp_path: Path) -> None:
    """Without the lock the second one reads the index before the first one has written it, and one form is lost."""
    (tmp_path / "triples.py").write_text("import numba\n\n\n@numba.njit(cache=True)\ndef triple(value):\n    return value * 3\n")
    types = ("int64", "float64")

    def start(dtype: str, *how: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", SAVES, str(tmp_path / "cache"), str(tmp_path), dtype, *how]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)

    for found, how in (("0", ["slowly"]), ("1", [])):
        started = [start(dtype, *how) for dtype in types]
        assert [process.communicate(timeout=220)[0].strip() for process in started] == [found, found]


def test_kernels_are_kept_where_that_goes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    compiled.keep_in(str(tmp_path / "cache"))
    check_compiles()
    assert list((tmp_path / "cache").rglob("*.nbc"))
    assert not caplog.text


def test_a_folder_is_the_same_for_compilers_which_run_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    compiled.keep_in("cache")
    assert Path(compiled.folder()).parent == tmp_path / "cache"


@pytest.mark.parametrize("room_bytes", [0, 1 << 60])
def test_a_folder_that_takes_no_files_costs_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, room_bytes: int
) -> None:
    """If the folder cannot be made, or its disk lacks free space, kernels go to a temporary folder instead, with a warning."""
    monkeypatch.setattr(compiled.tempfile, "tempdir", str(tmp_path))
    (tmp_path / "file").write_text("")
    wanted = str(tmp_path / "cache") if room_bytes else str(tmp_path / "file" / "cache")
    instead = compiled.writable(wanted, room_bytes)
    assert os.path.dirname(instead) == str(tmp_path)
    assert os.path.basename(instead).startswith("hearthd-kernels-")
    assert f"{wanted}: " in caplog.text
    assert "compiled again next time" in caplog.text
    assert compiled.writable(wanted, room_bytes) == instead, "one a process"
