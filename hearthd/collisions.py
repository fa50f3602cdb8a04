"""Finds packages of other distributions that have the name of one of hearthd's packages, and says what to do about them.

Reads the file lists of all installed distributions, which takes ten milliseconds or more. Therefore it runs only for `hearth
doctor`, and after hearthd/packages.py has found something unusual.
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
    """A conflict of one of hearthd's packages with another distribution's package of the same name. package: the name. kind:
    "elsewhere": Python finds another package first; "replaced": the `__init__.py` in hearthd's folder is another distribution's;
    "missing": hearthd's folder has no `__init__.py`; "shared": Python finds hearthd's package, which hides that of `owner`. path:
    the other file (kind "missing": the missing one). owner: the other file's distribution and version, "" if no installed
    distribution has it."""

    package: str
    kind: str
    path: str
    owner: str

    @property
    def breaks(self) -> bool:
        """Returns whether the collision keeps hearthd from running."""
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
        """Returns one phrase for the operator that says how to remove the collision, such as "install hearthd again"."""
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
    """Returns the collisions of hearthd's packages with packages of other distributions, [] if there are none. names: the packages
    to check. home: the folder that contains hearthd's packages."""
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
    """Returns the lines for stderr if collisions keep hearthd from running. program: the command's name, hearthd or hearth."""
    return f"{program}: not started, for another package stands where one of hearthd's belongs:\n{_lines(found)}"


def warning(program: str, found: Sequence[Collision]) -> str:
    """Returns the lines for stderr if hearthd can run in spite of the collisions, but other software in this environment may not.
    program: the command's name, hearthd or hearth."""
    return f"{program}: warning: another distribution has packages of the same name:\n{_lines(found)}"


def findings(found: Sequence[Collision], as_json: bool) -> str:
    """Returns the text that `hearth doctor` prints if collisions prevent all its other checks: a line for each, or JSON if
    as_json."""
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
    """Returns two lists. The first: files that other distributions have installed under these names, one per package: its
    `__init__.py` if it has one, else the first file. The second: files with these names in the folders that editable
    distributions (`pip install -e`) link to, whether or not Python finds them there."""
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
    """Returns the paths of a distribution's files, relative to the folder in which it is installed, as its installer recorded them.
    If it recorded only the packages' names, these are `NAME/__init__.py`."""
    if (record := distribution.read_text("RECORD")) is not None:
        return [line.partition(",")[0].strip('"') for line in record.splitlines()]
    if (installed := distribution.read_text("installed-files.txt")) is not None:  # the paths are relative to the .egg-info folder
        return [os.path.normpath(os.path.join("x.egg-info", line)) for line in installed.splitlines()]
    return [f"{line}/__init__.py" for line in (distribution.read_text("top_level.txt") or "").split()]


def _editable(distribution: metadata.Distribution) -> str:
    """Returns the folder that a distribution installed with `pip install -e` links to, "" for any other distribution."""
    try:
        told = json.loads(distribution.read_text("direct_url.json") or "{}")
        return unquote(urlparse(told["url"]).path) if told["dir_info"]["editable"] else ""
    except (ValueError, KeyError, TypeError):
        return ""


def _owner(path: str, claims: Sequence[tuple[str, str]]) -> str:
    """Returns the distribution and version that own the file `path`, "" if none does. claims: pairs of a path and its owner."""
    return next((owner for claimed, owner in claims if _same(path, claimed)), "")


def _same(path: str, other: str) -> bool:
    return os.path.realpath(path) == os.path.realpath(other)
