"""Sources that benchmarks replace lines of: child processes run the replacement, and a line that is no longer there is told."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.divided import moved, under_way
from benchmarks.edited import Edits, edited
from engine.host.child_process import child_environment

PRINTS = "from loader.sizes import slices; print(slices._met([(0, 1), (1, 2)]))"


def printed(edits: Edits) -> subprocess.CompletedProcess[str]:
    """Runs a process as hearthd starts its children."""
    with edited(edits):
        command = [sys.executable, "-P", "-c", PRINTS]
        return subprocess.run(command, env=child_environment(), capture_output=True, text=True, timeout=60, check=False)


def test_children_run_the_replacement() -> None:
    before = dict(os.environ)
    found = printed({"loader.sizes.slices": [("    return tuple(found)\n", "    return tuple(found * 2)\n")]})
    assert found.stdout == "((0, 2), (0, 2))\n", found.stderr
    assert printed({}).stdout == "((0, 2),)\n"
    assert dict(os.environ) == before


def test_a_text_that_is_not_there_is_told() -> None:
    found = printed({"loader.sizes.slices": [("no such line", "")]})
    assert found.returncode == 1
    assert "ImportError: loader.sizes.slices has no 'no such line'" in found.stderr


@pytest.mark.parametrize("edits", [moved(1), under_way(3)], ids=["moved", "under way"])
def test_what_other_divisions_replace_is_there(edits: Edits) -> None:
    for module, replaced in edits.items():
        spec = importlib.util.find_spec(module)
        assert spec is not None
        assert spec.origin is not None
        source = Path(spec.origin).read_text()
        for old, _ in replaced:
            assert old in source, module
