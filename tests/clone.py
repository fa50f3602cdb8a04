"""The files of the clone as git knows them, for runs that put a copy of it somewhere else."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def copy_to(folder: Path) -> None:
    """Copies what git tracks, or would, with its times: Numba's cache goes by them."""
    listed = ["git", "-c", f"safe.directory={ROOT}", "-C", str(ROOT), "ls-files", "-coz", "--exclude-standard"]
    names = subprocess.run(listed, check=True, capture_output=True, text=True).stdout.split("\0")
    for name in filter(None, names):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
