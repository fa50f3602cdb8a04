"""Other versions of hearthd: copies of its packages with other numbers where processes tell each other what they speak, and in what
a daemon hands over to the next."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import NamedTuple

from hearthd.packages import NAMES
from tests.e2e.node import ROOT


class Version(NamedTuple):
    """One that can be installed. tree: the folder of its packages. name: what it calls itself. handed_over: the version of what it
    hands over; who has another one cannot go on with it."""

    tree: Path
    name: str
    handed_over: int


def all_versions(folder: Path) -> tuple[Version, ...]:
    """Returns this version, the next one, and one that cannot read what the others hand over. The copies are made in `folder`."""
    own = re.search(r'VERSION = "(.+)"', (ROOT / "daemon/process/version.py").read_text())
    assert own is not None
    next_one, far = _copy(folder / "next"), _copy(folder / "far")
    for tree, name in ((next_one, "0.9.8"), (far, "0.9.9")):
        _change(tree / "daemon/process/version.py", rf'VERSION = "{re.escape(own[1])}"', f'VERSION = "{name}"')
        _change(tree / "engine/protocol.py", r"PROTOCOL_VERSION = \d+", "PROTOCOL_VERSION = 998")
    for file in ("daemon/http/handed_over.py", "daemon/engines/kept_device.py", "daemon/engines/host_account.py"):
        _change(far / file, r"^VERSION = \d+", "VERSION = 999")
    return Version(ROOT, own[1], 1), Version(next_one, "0.9.8", 1), Version(far, "0.9.9", 999)


def _copy(tree: Path) -> Path:
    shutil.rmtree(tree, ignore_errors=True)
    for package in (*NAMES, "hearthd"):
        shutil.copytree(ROOT / package, tree / package)  # with the times of the files, by which compiled kernels are found again
    return tree


def _change(path: Path, pattern: str, text: str) -> None:
    changed, number = re.subn(pattern, text, path.read_text(), flags=re.MULTILINE)
    assert number == 1, f"{path}: {pattern}"
    path.write_text(changed)
