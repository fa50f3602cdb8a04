"""A copy of a package with a new file and a new line, and programs that run with it in a process of their own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def changed_package(root: Path, package: str, file: str, text: str, registry: str, line: str, after: str) -> Path:
    """Copies the package to `root`, writes `file` there, and adds a line to its registry, another file, after the one that begins
    with `after`."""
    shutil.copytree(ROOT / package, root / package, ignore=shutil.ignore_patterns("__pycache__"))
    (root / package / file).write_text(text)
    listed = root / package / registry
    lines = listed.read_text().splitlines(keepends=True)
    (at,) = (number for number, known in enumerate(lines) if known.startswith(after))
    listed.write_text("".join([*lines[: at + 1], f"{line}\n", *lines[at + 1 :]]))
    return root


def told_by(tree: Path, program: str, *arguments: str) -> Any:
    """Returns what the program prints as its last line, JSON, when the changed package is the one in `tree`. It must tell where
    that was imported from: {package: file}."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join((str(tree), str(ROOT)))}
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    (package,) = (path.name for path in tree.iterdir() if path.is_dir() and (path / "__init__.py").exists())
    assert Path(told[package]).is_relative_to(tree)
    return told
