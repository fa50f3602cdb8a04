"""Checks whether `config`, `daemon`, `engine`, `loader` and `scheduler` are hearthd's own packages. Other distributions use these
names, too (python-daemon installs `daemon`), and pip overwrites files without a warning.

Every start of a program makes this check (hearthd/start.py), so it takes less than a millisecond if nothing is wrong. Anything
unusual is examined by hearthd/collisions.py, which reads the lists of all installed distributions. This check misses one case,
which only `hearth doctor` finds: hearthd's package has overwritten another distribution's package of a single file.
"""

from __future__ import annotations

import os
import sys

NAMES = ("config", "daemon", "engine", "loader", "scheduler")
MARK = b"Part of hearthd."  # in the docstring of each of these packages
HOME = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def odd(home: str = HOME) -> list[str]:
    """Returns the names of hearthd's packages that must be examined further: those that Python finds outside `home`, that lack the
    mark of hearthd in their docstring, or that share their folder in `home` with files that hearthd did not install. home: the
    folder that contains hearthd's packages."""
    shared = _shared(home)
    return [name for name in NAMES if name in shared or not is_found(home, name) or not is_marked(home, name)]


def is_found(home: str, name: str) -> bool:
    """Returns whether `import name` runs the package in `home`."""
    return origin(name) == os.path.join(home, name, "__init__.py")


def origin(name: str) -> str:
    """Returns the file that `import name` would run, "" if it finds nothing or only a folder without `__init__.py`."""
    for finder in sys.meta_path:
        find = getattr(finder, "find_spec", None)
        spec = find(name, None) if find is not None else None
        if spec is not None:
            return os.path.abspath(spec.origin) if spec.origin else ""
    return ""


def is_marked(home: str, name: str) -> bool:
    """Returns whether the package in `home` says in its docstring that it is part of hearthd; False if it cannot be read."""
    try:
        with open(os.path.join(home, name, "__init__.py"), "rb", buffering=0) as file:
            return MARK in file.read(4096)
    except OSError:
        return False


def _shared(home: str) -> set[str]:
    """Returns the names of hearthd's packages whose folder in `home` contains an entry that hearthd did not install, or beside
    which a file `NAME.py` lies. Returns an empty set if there is no list of the files that hearthd's wheel installed."""
    try:
        entries = os.listdir(home)
        lists = [one for one in entries if one.startswith("hearthd-") and one.endswith(".dist-info")]
        with open(os.path.join(home, lists[0], "RECORD"), encoding="utf-8", errors="surrogateescape") as file:
            text = file.read()
        ours = _entries(text)
        if f"{NAMES[0]}/__init__.py" not in ours:
            return set()  # hearthd is installed as a link to a clone
        ours |= {f"{name}/__pycache__" for name in NAMES}
        strays = {name for name in NAMES for entry in os.listdir(os.path.join(home, name)) if f"{name}/{entry}" not in ours}
    except (OSError, IndexError):
        return set()
    return strays | {name for name in NAMES if f"{name}.py" in entries}


def _entries(record: str) -> set[str]:
    """Returns the files and folders directly inside the folder of each package, e.g. `config/load.py`. record: the text of RECORD,
    the list of all files that hearthd's wheel installed."""
    found, folder = set(), "\0"
    for line in record.split("\n"):
        if line.startswith(folder):  # the list is sorted, so most lines belong to the previous line's folder
            continue
        end = line.find("/", line.find("/") + 1)
        if end < 0:
            found.add(line.partition(",")[0])
        else:
            found.add(line[:end])
            folder = line[: end + 1]
    return found
