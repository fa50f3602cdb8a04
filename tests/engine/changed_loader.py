"""A copy of loader/ with a new file and a new line, and programs that run with it in a process of their own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def changed_loader(root: Path, file: str, text: str, registry: str, lines: Mapping[str, str]) -> Path:
    """Copies loader/ to `root`, writes `file` there, and replaces in its registry, another file, what stands once by what is to
    stand in its place."""
    shutil.copytree(ROOT / "loader", root / "loader", ignore=shutil.ignore_patterns("__pycache__"))
    (root / "loader" / file).write_text(text)
    listed = root / "loader" / registry
    for before, after in lines.items():
        assert listed.read_text().count(before) == 1
        listed.write_text(listed.read_text().replace(before, after))
    return root


def told_by(tree: Path, program: str, *arguments: str) -> Any:
    """Returns what the program prints as its last line, JSON, when `loader` is the one in `tree`."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join((str(tree), str(ROOT)))}
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert Path(told["loader"]).is_relative_to(tree)
    return told
