"""Other versions of hearthd: copies of its packages with other numbers where processes tell each other what they speak, and in what
a daemon leaves to the next."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import NamedTuple

from hearthd.packages import NAMES
from tests.e2e.node import ROOT


class Version(NamedTuple):
    """One that can be installed. tree: the folder of its packages. name: what it calls itself. is_far: it cannot read what the
    others leave to it, nor they what it leaves."""

    tree: Path
    name: str
    is_far: bool = False


def all_versions(folder: Path) -> tuple[Version, ...]:
    """Returns this version, the next one, whose formats have a field more, and one that cannot read what the others leave. The
    copies are made in `folder`."""
    own = re.search(r'VERSION = "(.+)"', (ROOT / "daemon/process/version.py").read_text())
    assert own is not None
    next_one, far = _copy(folder / "next"), _copy(folder / "far")
    for tree, name in ((next_one, "0.9.8"), (far, "0.9.9")):
        _change(tree / "daemon/process/version.py", rf'VERSION = "{re.escape(own[1])}"', f'VERSION = "{name}"')
        _change(tree / "engine/protocol.py", r"PROTOCOL_VERSION = \d+", "PROTOCOL_VERSION = 998")
    for file in ("daemon/http/handed_over.py", "daemon/engines/kept_device.py", "daemon/engines/host_account.py"):
        given = re.search(r"^FORMAT = Format\(version=(\d+), .+\)", (ROOT / file).read_text(), re.MULTILINE)
        assert given is not None, file
        now = int(given[1])
        _change(next_one / file, re.escape(given[0]), f"FORMAT = Format(version={now + 1}, reads_from={now}, readable_from={now})")
        _change(next_one / file, r"^    readable_from: int = 0", "    readable_from: int = 0\n    further: int = 7")
        _change(far / file, re.escape(given[0]), "FORMAT = Format(version=999, reads_from=999, readable_from=999)")
    return Version(ROOT, own[1]), Version(next_one, "0.9.8"), Version(far, "0.9.9", is_far=True)


def _copy(tree: Path) -> Path:
    shutil.rmtree(tree, ignore_errors=True)
    for package in (*NAMES, "hearthd"):
        shutil.copytree(ROOT / package, tree / package)  # with the times of the files, by which compiled kernels are found again
    return tree


def _change(path: Path, pattern: str, text: str) -> None:
    changed, number = re.subn(pattern, text, path.read_text(), count=1, flags=re.MULTILINE)
    assert number == 1, f"{path}: {pattern}"
    path.write_text(changed)
