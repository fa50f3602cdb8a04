"""What a child process is given to find packages."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from engine.host.child_process import PACKAGES, child_environment


def test_our_packages_come_first_and_folders_given_to_us_are_handed_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"wheels/site::{tmp_path}/other")
    given = child_environment(OMP_NUM_THREADS="1")
    # the child runs elsewhere: a relative folder would be another one there
    assert given["PYTHONPATH"] == os.pathsep.join([str(PACKAGES), f"{tmp_path}/wheels/site", f"{tmp_path}/other"])
    assert given["OMP_NUM_THREADS"] == "1"
    monkeypatch.delenv("PYTHONPATH")
    assert child_environment()["PYTHONPATH"] == str(PACKAGES)
