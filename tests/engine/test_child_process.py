"""What a child process is given to find packages."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from engine.host.child_process import PACKAGES, child_environment, malloc_tunables


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
