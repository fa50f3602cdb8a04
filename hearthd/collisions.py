"""Which other distribution stands where a package of hearthd's belongs, told so that it can be mended.

Reads the file lists of all installed distributions, some ten milliseconds and more: only for `hearth doctor`, and once something
is odd.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from urllib.parse import unquote, urlparse

from hearthd.packages import HOME, NAMES, is_marked, origin

_Claim = tuple[str, str, str]  # package, path, distribution and version
ELSEWHERE, REPLACED, MISSING, SHARED = "elsewhere", "replaced", "missing", "shared"


@dataclass(frozen=True, slots=True)
class Collision:
    """kind: elsewhere: another package is found first; replaced: another distribution's `__init__.py` lies in hearthd's folder;
    missing: it has none; shared: hearthd's own is found, and that of `owner` cannot be. path: the other file. owner: its
    distribution and version, "" where no installed one has it."""

    package: str
    kind: str
    path: str
    owner: str

    @property
    def breaks(self) -> bool:
        """Whether hearthd cannot run so."""
        return self.kind != SHARED

    def __str__(self) -> str:
        of = f"of {self.owner}" if self.owner else "of no distribution that is installed"
        return {
            ELSEWHERE: f"{self.package}: Python finds {self.path}, {of}, before hearthd's own in {HOME}",
            REPLACED: f"{self.package}: {self.path} is no longer hearthd's: it was overwritten, now {of}",
            MISSING: f"{self.package}: {self.path} is missing: another distribution's removal took it away, perhaps",
            SHARED: f"{self.package}: {self.owner} has installed {self.path}, beside or over hearthd's, and may not work",
        }[self.kind]

    @property
    def change(self) -> str:
        """What to do, one sentence."""
        if self.kind == MISSING:
            return "install hearthd again"
        if not self.owner and self.kind == ELSEWHERE:
            folder = os.path.dirname(os.path.dirname(self.path) if self.path.endswith("__init__.py") else self.path)
            given = [os.path.abspath(one) for one in os.environ.get("PYTHONPATH", "").split(os.pathsep) if one]
            if folder in given:
                return f"take {folder} out of PYTHONPATH"
            return f"start hearthd from a folder other than {folder}, or with `python -P -m hearthd`"
        apart = "give hearthd a virtual environment of its own (pipx makes one)"
        if not self.owner:
            return f"install hearthd again; better, {apart}"
        return f"{apart}; or {sys.executable} -m pip uninstall {self.owner.partition(' ')[0]}, and install hearthd again"


def look_into(names: Sequence[str] = NAMES, home: str = HOME) -> list[Collision]:
    """Returns what is wrong with these packages, [] where nothing is."""
    installed, linked = _claims(names)
    found: list[Collision] = []
    for name in names:
        own, first = os.path.join(home, name, "__init__.py"), origin(name)
        others = [(path, owner) for package, path, owner in [*installed, *linked] if package == name]
        if first and not _same(first, own):
            found.append(Collision(name, ELSEWHERE, first, _owner(first, others)))
        elif not os.path.exists(own):
            found.append(Collision(name, MISSING, own, ""))
        elif not is_marked(home, name):
            found.append(Collision(name, REPLACED, own, _owner(own, others)))
        else:
            found += [Collision(name, SHARED, path, owner) for package, path, owner in dict.fromkeys(installed) if package == name]
    return found


def refusal(program: str, found: Sequence[Collision]) -> str:
    """The lines for stderr where hearthd cannot run."""
    return f"{program}: not started, for another package stands where one of hearthd's belongs:\n{_lines(found)}"


def warning(program: str, found: Sequence[Collision]) -> str:
    """The lines for stderr where hearthd can run, and something else in this environment may not."""
    return f"{program}: warning: another distribution has packages of the same name:\n{_lines(found)}"


def findings(found: Sequence[Collision], as_json: bool) -> str:
    """What `hearth doctor` prints where it cannot look at anything else."""
    rows = [
        {"check": "installation", "level": "fail" if one.breaks else "warn", "found": str(one), "change": one.change}
        for one in found
    ]
    if as_json:
        return json.dumps({"settings": {}, "findings": rows}, indent=1) + "\n"
    lines = [f"{row['level']:4} · {row['check']}: {row['found']} · {row['change']}" for row in rows]
    return "\n".join(["nothing else can be checked before this is mended", *lines]) + "\n"


def _lines(found: Sequence[Collision]) -> str:
    changes = dict.fromkeys(one.change for one in found)
    return "".join(f"  {one}\n" for one in found) + "".join(f"  What to do: {change}.\n" for change in changes)


def _claims(names: Sequence[str]) -> tuple[list[_Claim], list[_Claim]]:
    """Returns what other distributions have installed under these names, of each its `__init__.py` if it has one, else the first
    file; and what lies under these names in the folders that others are links to (`pip install -e`), whether or not it is found
    there."""
    installed, linked = [], []
    for distribution in metadata.distributions():
        name = distribution.metadata["Name"] or "a distribution without a name"
        if name == "hearthd":
            continue
        owner = f"{name} {distribution.version}"
        files: dict[str, str] = {}
        for file in _files(distribution):
            top = file.partition("/")[0].removesuffix(".py")
            if top in names and (top not in files or file in (f"{top}/__init__.py", f"{top}.py")):
                files[top] = os.path.abspath(str(distribution.locate_file(file)))
        installed += [(package, path, owner) for package, path in files.items()]
        if project := _editable(distribution):
            folders = (project, f"{project}/src")
            paths = [(one, f"{folder}/{one}{end}") for one in names for folder in folders for end in ("/__init__.py", ".py")]
            linked += [(package, path, owner) for package, path in paths if os.path.exists(path)]
    return installed, linked


def _files(distribution: metadata.Distribution) -> list[str]:
    """Paths below the folder of a distribution, as its installer wrote them down."""
    if (record := distribution.read_text("RECORD")) is not None:
        return [line.partition(",")[0].strip('"') for line in record.splitlines()]
    if (installed := distribution.read_text("installed-files.txt")) is not None:  # relative to the .egg-info
        return [os.path.normpath(os.path.join("x.egg-info", line)) for line in installed.splitlines()]
    return [f"{line}/__init__.py" for line in (distribution.read_text("top_level.txt") or "").split()]


def _editable(distribution: metadata.Distribution) -> str:
    """The folder that a distribution installed with `pip install -e` is a link to, else ""."""
    try:
        told = json.loads(distribution.read_text("direct_url.json") or "{}")
        return unquote(urlparse(told["url"]).path) if told["dir_info"]["editable"] else ""
    except (ValueError, KeyError, TypeError):
        return ""


def _owner(path: str, claims: Sequence[tuple[str, str]]) -> str:
    """Returns the distribution that claims `path`, "" for none."""
    return next((owner for claimed, owner in claims if _same(path, claimed)), "")


def _same(path: str, other: str) -> bool:
    return os.path.realpath(path) == os.path.realpath(other)
